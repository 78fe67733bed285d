"""One colour a thing across the series, and what each colour becomes on a dark page."""

from asrkit.shapes import expect

COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#57606a")
BLUE, RED, GREEN, BROWN, PURPLE, GREY = COLOURS
PALE = "#eaeef2"  # what is there, but not the subject: padding, empty states
PALE_GREY = "#c9d1d9"
ORANGE = "#f2b866"
PALE_BLUE = "#9ec5fe"
PALE_RED = "#ffb3ad"

THINGS = {  # what appears in several notebooks
    # losses
    "reference": GREY,
    "torchaudio": RED,
    "wavefront": PURPLE,
    "numba_cpu": BROWN,
    "numba_cpu_overwrite": BROWN,
    "numba_cuda": BROWN,
    "compact": GREEN,
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
    # batches
    "useful": BLUE,
    "padding": RED,
    "waiting": BROWN,
    # tensors of the joint: a gradient is the pale colour of its tensor
    "logits": RED,
    "gradient of logits": PALE_RED,
    "hidden layer": BLUE,
    "gradient of hidden layer": PALE_BLUE,
    "lattice": GREEN,
    "tiles": BROWN,
    "gradient of weights": PURPLE,
    "gradients": PURPLE,
    "gradient of earlier sub-batches": GREY,
    # operations of an encoder
    "cast": RED,
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
    "host": BLUE,
    "device": RED,
    "cores": BLUE,
    "GPUs": RED,
}

# Colour in a figure -> name of its CSS variable, and its value on a dark page. Any other colour
# is the same on both.
DARK = {
    "#000000": ("ink", "#e6edf3"),
    "#ffffff": ("paper", "#0d1117"),
    BLUE: ("blue", "#6cb6ff"),
    RED: ("red", "#ff7b72"),
    GREEN: ("green", "#56d364"),
    BROWN: ("brown", "#e3b341"),
    PURPLE: ("purple", "#d2a8ff"),
    GREY: ("grey", "#9da7b1"),
    "#808080": ("middle-grey", "#9da7b1"),
    "#cccccc": ("frame", "#484f58"),
    PALE: ("pale", "#2a313a"),
    PALE_GREY: ("pale-grey", "#57606a"),
    PALE_BLUE: ("pale-blue", "#1f4b8e"),
    PALE_RED: ("pale-red", "#8e2f2a"),
}


def colour(thing: str) -> str:
    """The colour `#rrggbb` of a thing on every page, as `colour("lean")`.

    Args:
        thing: A name in `THINGS`.

    Raises:
        ValueError: The name is unknown.
    """
    remedy = "Add it to THINGS in asrkit/workbench/plots/palette.py."
    expect(thing in THINGS, "thing", f"one of {', '.join(THINGS)}", repr(thing), remedy)
    return THINGS[thing]
