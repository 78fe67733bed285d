"""A step of an LSTM predictor in fewer kernels, for the loops that a CUDA graph holds.

A step of n layers launches 3 n + 1 kernels before its results are stacked: the embedding's lookup,
and for each layer two products and a cell. On folded weights they are 2 n + 1: the first layer's
input is a row of a table, and one product serves the hidden states of all layers.
"""

from typing import Any

import torch
from torch import Tensor, nn

State = tuple[Tensor, Tensor]  # hidden and cell, (B, layers, D) each


class FoldedPredictor:
    """`TransducerModel.predict` on weights that `fold` has prepared; it keeps no model alive.

    Attributes:
        table: (V, 4 D) gates that the first layer gets from each label.
        recurrent: (layers, 4 D, D) weights of the hidden states.
    """

    def __init__(self, predictor: Any) -> None:
        """Allocate the tables; nothing is folded.

        Args:
            predictor: An `LSTMPredictor` with an `nn.LSTM`.
        """
        weight = predictor.lstm.weight_hh_l0
        rows, D = weight.shape
        layers = predictor.lstm.num_layers
        self.table = weight.new_empty(predictor.embedding.num_embeddings, rows)
        self.recurrent = weight.new_empty(layers, rows, D)

    @torch.no_grad()
    def fold(self, model: Any) -> None:
        """Fold the weights of `model`, a `TransducerModel`, into the tables, where they lie."""
        lstm = model.predictor.lstm
        for layer in range(lstm.num_layers):
            self.recurrent[layer].copy_(getattr(lstm, f"weight_hh_l{layer}"))
        torch.mm(model.predictor.embedding.weight, lstm.weight_ih_l0.mT, out=self.table)

    def predict(self, model: Any, labels: Tensor, state: State) -> tuple[Tensor, State]:
        """What `model.predict` returns.

        Args:
            model: The `TransducerModel` that was folded.
            labels: (B,) int64.
            state: Of an earlier step.
        """
        hidden_before, cell_before = state
        lstm = model.predictor.lstm
        recurrent = hidden_before.transpose(0, 1) @ self.recurrent.mT  # (layers, B, 4 D)
        hidden_states: list[Tensor] = []
        cells: list[Tensor] = []
        gates = nn.functional.embedding(labels, self.table)
        for layer in range(lstm.num_layers):
            if layer:
                gates = hidden_states[-1] @ getattr(lstm, f"weight_ih_l{layer}").mT
            biases = getattr(lstm, f"bias_ih_l{layer}"), getattr(lstm, f"bias_hh_l{layer}")
            hidden, cell = _cell(gates, recurrent[layer], cell_before[:, layer], *biases)
            hidden_states.append(hidden)
            cells.append(cell)
        predicted = model.predictor_projection(hidden_states[-1])
        if lstm.num_layers == 1:  # a view, where a stack would copy
            return predicted, (hidden[:, None], cell[:, None])
        return predicted, (torch.stack(hidden_states, 1), torch.stack(cells, 1))


def _cell(gates: Tensor, recurrent: Tensor, cell: Tensor, *biases: Tensor) -> State:
    """Hidden and cell (B, D) of a cell whose gates (B, 4 D) are the sum of what is given."""
    if gates.is_cuda:
        hidden, cell, _ = torch.ops.aten._thnn_fused_lstm_cell(gates, recurrent, cell, *biases)
        return hidden, cell
    dtype = gates.dtype
    wide = torch.promote_types(dtype, torch.float32)  # in which the kernel above computes, too
    total = gates.to(wide) + recurrent + biases[0] + biases[1]
    enter, forget, content, leave = total.chunk(4, 1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * content.tanh()
    hidden = leave.sigmoid() * cell.tanh()
    return hidden.to(dtype), cell.to(dtype)
