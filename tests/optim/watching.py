"""What sees that a step reads a value on the host: see test_lamb.py and test_novograd.py."""

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from asrkit.runtime import op_name, waits


class Waits(TorchDispatchMode):
    """Names of the ops that read a value on the host."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if waits(func, args, kwargs or {}):
            self.names.append(op_name(func))
        return func(*args, **(kwargs or {}))


class Reads(TorchFunctionMode):
    """Refuses what hands a tensor's values to Python."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        assert name not in (
            "item",
            "tolist",
            "numpy",
            "__bool__",
            "__float__",
            "__int__",
        ), name
        return func(*args, **(kwargs or {}))
