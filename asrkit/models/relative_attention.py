"""FastConformer's attention: multi-head, with relative positions, over all frames or near ones."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Context = tuple[int, int]  # frames that a frame attends to on its (left, right); -1 for all


def relative_positions(first: int, last: int, D: int, like: Tensor) -> Tensor:
    """Sinusoids of relative positions, sine and cosine interleaved (arXiv 1706.03762, section 3.5).

    Computed in float32: bfloat16 cannot count beyond 256 frames.

    Args:
        first: The first distance, in frames. Distances decrease by one to `last`.
        last: The last distance.
        D: Width of a position.
        like: A tensor whose device and dtype the result has.

    Returns:
        (first - last + 1, D).
    """
    device = like.device
    distances = torch.arange(first, last - 1, -1, device=device, dtype=torch.float32)
    exponents = torch.arange(0, D, 2, device=device, dtype=torch.float32) * (-math.log(10_000) / D)
    angles = distances[:, None] * exponents.exp()
    interleaved = torch.stack([angles.sin(), angles.cos()], -1).flatten(1)
    return interleaved[:, :D].to(like.dtype)


class RelativeAttention(nn.Module):
    """Multi-head attention with relative positions (arXiv 1901.02860, section 3.3).

    Args:
        width: Width of the frames, D.
        heads: Attention heads, H, a divisor of `width`.
        dropout: Share of attention weights dropped in training.
        bias: Whether the linear layers have biases; the layer of the positions has none.
    """

    def __init__(self, width: int, heads: int, *, dropout: float, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)
        self.position = nn.Linear(width, width, bias=False)
        shape = (heads, 1, width // heads)
        self.content_bias = nn.Parameter(torch.zeros(shape))
        self.position_bias = nn.Parameter(torch.zeros(shape))

    def forward(
        self,
        x: Tensor,
        valid: Tensor,
        positions: Tensor,
        context: Context,
    ) -> Tensor:
        """Attended frames (B, T, D).

        Args:
            x: Frames (B, T, D).
            valid: True for frames outside the padding (B, T), bool.
            positions: `relative_positions` of the distances in `distance_range(T, context)`.
            context: Frames that a frame attends to on its (left, right); -1 for all.
        """
        B, T, _ = x.shape
        H = self.heads
        qkv = self.qkv(x).view(B, T, 3, H, -1).transpose(1, 3)
        q, k, v = qkv.unbind(2)  # each (B, H, T, D/H)
        p = self.position(positions).unflatten(1, (H, -1)).permute(1, 2, 0)  # (H, D/H, P)
        p = p / math.sqrt(p.shape[1])
        # Heads are the batch of this product, so that `p` is not copied for every utterance.
        queries = (q + self.position_bias).transpose(0, 1).flatten(1, 2)  # (H, B T, D/H)
        scores = (queries @ p).view(H, B, T, -1).transpose(0, 1)  # (B, H, T, P)
        q = q + self.content_bias
        share = self.dropout if self.training else 0.0
        if attends_in_blocks(T, context):
            return self.out(block_attention(q, k, v, scores, valid, context, share))
        bias = torch.where(allowed_keys(valid, context), by_key(scores), lowest(scores.dtype))
        mixed = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=share)
        return self.out(mixed.transpose(1, 2).flatten(2))


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scores: Tensor,
    valid: Tensor,
    context: Context,
    dropout: float = 0.0,
) -> Tensor:
    """Attention of blocks of queries to the keys around them: (B, T, D).

    A block of C = left + right queries sees W = C + left + right keys, so memory grows with T and
    not with T².

    Args:
        q: Queries (B, H, T, D/H).
        k: Keys, likewise.
        v: Values, likewise.
        scores: Scores of the positions (B, H, T, P), by distance from left to -right. They are
            added to the products of queries and keys.
        valid: True for frames outside the padding (B, T), bool.
        context: Frames that a frame attends to on its (left, right).
        dropout: Share of attention weights dropped.
    """
    B, H, T, _ = q.shape
    left, right = context
    C = max(left + right, 1)
    N = -(-T // C)  # blocks
    W = C + left + right
    pad_last = N * C - T
    pad_right = pad_last + right
    never = lowest(scores.dtype)
    q = F.pad(q, (0, 0, 0, pad_last)).view(B, H, N, C, -1)
    scores = F.pad(scores, (0, 0, 0, pad_last)).view(B, H, N, C, -1)  # (B, H, N, C, P)
    # Indexed, not unfolded: torch.compile's inductor (2.11) computes wrong gradients of keys that
    # are unfolded into overlapping windows.
    starts = torch.arange(N, device=k.device)[:, None] * C
    windows = starts + torch.arange(W, device=k.device)  # (N, W), keys of each block
    # Each (B, H, N, W, D/H):
    k, v = (F.pad(part, (0, 0, left, pad_right))[:, :, windows] for part in (k, v))
    # The window of query c in a block begins c keys later, so its row of P = left + right + 1
    # distances moves c columns to the right.
    bias = F.pad(scores, (0, C), value=never).flatten(-2)
    bias = bias[..., :-C].view(B, H, N, C, W)
    allowed = F.pad(valid, (left, pad_right)).unfold(1, W, C)  # (B, N, W)
    bias = torch.where(allowed[:, None, :, None, :], bias, never)
    # Blocks become utterances: (B N, H, C or W, ...).
    q, k, v, bias = (part.transpose(1, 2).flatten(0, 1) for part in (q, k, v, bias))
    mixed = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=dropout)
    return mixed.transpose(1, 2).reshape(B, N * C, -1)[:, :T]


def lowest(dtype: torch.dtype) -> float:
    """The bias that masks a key: half the lowest finite number of `dtype`.

    With the lowest number itself, adding a score could overflow to -inf in float16.
    """
    return torch.finfo(dtype).min / 2


def by_key(scores: Tensor) -> Tensor:
    """Scores by key (..., T, T), a view of scores by distance (..., T, 2T).

    Column c of row t has distance T - c, so key s is in column T - t + s. In one long row of all
    scores, the keys of row t begin at T + t (2T - 1): hence rows of 2T - 1 columns.
    """
    *leading, T, _ = scores.shape
    rows = scores.flatten(-2)[..., T:].view(*leading, T, 2 * T - 1)
    return rows[..., :T]


def allowed_keys(valid: Tensor, context: Context) -> Tensor:
    """Which keys a query attends to: valid ones within `context`, (B, 1, 1 or T, T) bool."""
    left, right = context
    allowed = valid[:, None, None, :]  # (B, 1, 1, T)
    frames = torch.arange(valid.shape[1], device=valid.device)
    distance = frames[:, None] - frames  # (T, T), of query and key
    if left >= 0:
        allowed = allowed & (distance <= left)
    if right >= 0:
        allowed = allowed & (-distance <= right)
    return allowed


def attends_in_blocks(T: int, context: Context) -> bool:
    """Whether attention over T frames is computed in blocks, as it is where T exceeds two contexts.

    A program of torch.export never does, because it has one form for all T.
    """
    if torch.compiler.is_exporting():
        return False
    return min(context) >= 0 and 2 * sum(context) < T


def distance_range(T: int, context: Context) -> tuple[int, int]:
    """First and last distance, in frames, whose positions attention needs.

    Args:
        T: Number of frames.
        context: Frames that a frame attends to on its (left, right); -1 for all.
    """
    if attends_in_blocks(T, context):
        left, right = context
        return left, -right
    return T, 1 - T
