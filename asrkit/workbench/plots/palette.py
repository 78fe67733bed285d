"""One colour for each thing across the series, and its variant on a dark page."""

import itertools
from collections.abc import Iterable

from matplotlib.colors import Colormap, LinearSegmentedColormap, to_rgba

from asrkit.shapes import expect

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
BLUE, RED, GREEN, BROWN, PURPLE, GREY = COLOURS
PALE = "#eaeef2"  # for what is not the subject: padding, empty states
PALE_COLOURS = ("#a5c8ff", "#ffb3b0", "#a6e3b0", "#e8cf9a", "#d9c7f7", "#c9d1d9")
PALE_BLUE, PALE_RED, PALE_GREEN, PALE_BROWN, PALE_PURPLE, PALE_GREY = PALE_COLOURS

THINGS = {  # things that appear in several notebooks
    # losses
    "reference": GREY,
    "torchaudio": RED,
    "wavefront": PURPLE,
    "numba": BROWN,
    "numba_cpu": BROWN,
    "numba_cpu_overwrite": PALE_BROWN,
    "numba_cuda": BROWN,
    "overwrite": PALE_BROWN,
    "triton": GREEN,
    "packed": GREEN,
    "lean": BLUE,
    # decoding strategies
    "one_by_one": GREY,
    "frame_looping": RED,
    "label_looping": BLUE,
    "windowed_looping": GREEN,
    # number formats
    "float32": GREY,
    "float16": BROWN,
    "bfloat16": BLUE,
    # contents of memory; a gradient has the pale colour of its tensor
    "logits": BLUE,
    "gradient of logits": PALE_BLUE,
    "hidden layer": BROWN,
    "gradient of hidden layer": PALE_BROWN,
    "lattice": GREY,
    "gradients": PURPLE,
    "gradient of weights": PALE_PURPLE,
    "gradient of halves": PALE_RED,
    "gradient of earlier sub-batches": PALE_GREY,
    "tiles": GREEN,
    # parts of a model, and of a recogniser
    "loading": GREY,
    "frontend": BROWN,
    "features": BROWN,
    "encoder": BLUE,
    "predictor": PURPLE,
    "joint": RED,
    "decoder": GREEN,
    # steps of an attention decoder
    "projections of frames": RED,
    "earlier tokens again": PALE_RED,
    "steps": GREEN,
    "rest of the steps": GREEN,
    "self-attention": PURPLE,
    "cross-attention": PALE_PURPLE,
    "feed-forward": GREEN,
    "prefill": PALE_BLUE,
    "output layer": RED,
    "choice of the token": GREY,
    # half precision
    "product": BLUE,
    "products": BLUE,
    "cast": RED,
    "casts": RED,
    # batches
    "useful": BLUE,
    "padding": RED,
    "padded audio": RED,
    "padded text": PALE_RED,
    "waiting": BROWN,
    # batching strategies
    "random": GREY,
    "random, by seconds": GREY,
    "random, by memory": GREY,
    "1D": BROWN,
    "2D": RED,
    "2D, synchronized": RED,
    "2D, each rank for itself": BROWN,
    "balanced": BLUE,
    # operations of an encoder
    "cast of input": PALE_RED,
    "cast of activation": PALE_RED,
    "cast of weight": RED,
    "matrix product": BLUE,
    "elementwise": PALE_BLUE,
    "attention": BROWN,
    "normalisation": PURPLE,
    "convolution": GREEN,
    "layout": GREY,
    # where something runs
    "cores": BLUE,
    "GPUs": RED,
}

# Colour in a figure -> name of its CSS variable, and its value on a dark page. Other colours are
# the same on both.
DARK_FRAME = {
    "#000000": ("ink", "#e6edf3"),
    "#ffffff": ("paper", "#0d1117"),
    "#808080": ("middle-grey", "#9da7b1"),
    "#cccccc": ("frame", "#484f58"),
}
DARK = DARK_FRAME | {
    BLUE: ("blue", "#6cb6ff"),
    RED: ("red", "#ff7b72"),
    GREEN: ("green", "#56d364"),
    BROWN: ("brown", "#e3b341"),
    PURPLE: ("purple", "#d2a8ff"),
    GREY: ("grey", "#9da7b1"),
    PALE: ("pale", "#2a313a"),
    PALE_BLUE: ("pale-blue", "#2f5d99"),
    PALE_RED: ("pale-red", "#8e3b38"),
    PALE_GREEN: ("pale-green", "#2a6b3a"),
    PALE_BROWN: ("pale-brown", "#7a5f24"),
    PALE_PURPLE: ("pale-purple", "#5d4591"),
    PALE_GREY: ("pale-grey", "#57606a"),
}


def colour(thing: str) -> str:
    """The colour `#rrggbb` of a thing in all pictures, for example `colour("lean")`.

    Raises:
        ValueError: `thing` is not in `THINGS`.
    """
    remedy = "Add it to THINGS in asrkit/workbench/plots/palette.py."
    expect(thing in THINGS, "thing", f"one of {', '.join(THINGS)}", repr(thing), remedy)
    return THINGS[thing]


def fading(shade: str) -> Colormap:
    """A colour map from transparent to `shade`, `#rrggbb`; low values show the page's colour."""
    ends = [to_rgba(shade, 0), to_rgba(shade, 1)]
    return LinearSegmentedColormap.from_list(f"fading {shade}", ends)


def colours_of(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name: its own if it is in `THINGS`, else the next unused colour."""
    unique = dict.fromkeys(names)
    known = {name: THINGS[name] for name in unique if name in THINGS}
    every = (*COLOURS, *PALE_COLOURS)
    unused = itertools.cycle([shade for shade in every if shade not in known.values()] or every)
    return {name: known.get(name) or next(unused) for name in unique}
