"""Which names a pickle may speak of: rebuilt by our own code, kept as an inert stub, or refused.

Nothing is ever imported or looked up. What could act (the standard library, builtins, torch and
numpy beyond a short list) refuses the file. A function of a package that is installed with us may be
named, as settings and metrics do, but a file that calls it is refused.
"""

import sys
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Container as Holds

from finetune_mile.checkpoints.readers import Refused

# Plain values; as stubs they are only data. What a partial would call is judged by its own name.
_INERT = frozenset(
    {
        "functools.partial",
        "operator.itemgetter",
        "builtins.Ellipsis",
        "torch.torch_version.TorchVersion",
        "torch._C.Generator",
        "torch.Generator",
        "torch._utils._rebuild_sparse_tensor",
        "torch.serialization._get_layout",
        "numpy.random.bit_generator.__pyx_unpickle_SeedSequence",
        "argparse.Namespace",
        "types.SimpleNamespace",
        "uuid.UUID",
        "decimal.Decimal",
        "fractions.Fraction",
        *(f"builtins.{name}" for name in ["bool", "float", "int", "object", "range", "slice", "str"]),
        *(f"datetime.{name}" for name in ["date", "datetime", "time", "timedelta", "timezone"]),
        *(f"typing.{name}" for name in ["Any", "Dict", "List", "Optional", "Sequence", "Tuple", "Union"]),
        *(
            f"pathlib.{name}"
            for name in ["Path", "PosixPath", "PurePath", "PurePosixPath", "PureWindowsPath", "WindowsPath"]
        ),
    }
)
# Packages whose work is to build or run code; `known` names of theirs are rebuilt nevertheless.
_ACTING = frozenset(
    [
        "cffi",
        "cloudpickle",
        "commands",
        "dill",
        "distutils",
        "IPython",
        "joblib",
        "multiprocess",
        "pathos",
        "pexpect",
        "pip",
        "pkg_resources",
        "popen2",
        "setuptools",
        "_distutils_hack",
    ]
)
# Installed with us, so a function of theirs is there to be called: only classes become stubs that may be called.
_INSTALLED = frozenset(
    [
        "PIL",
        "accelerate",
        "aiohttp",
        "datasets",
        "finetune_mile",
        "fsspec",
        "httpx",
        "huggingface_hub",
        "jinja2",
        "lightly",
        "lightning",
        "lightning_fabric",
        "lightning_utilities",
        "matplotlib",
        "packaging",
        "pandas",
        "psutil",
        "pyarrow",
        "pydantic",
        "pydantic_core",
        "pytest",
        "pytorch_lightning",
        "requests",
        "rich",
        "safetensors",
        "scipy",
        "sklearn",
        "sympy",
        "timm",
        "torchmetrics",
        "torchvision",
        "tqdm",
        "triton",
        "urllib3",
        "yaml",
    ]
)
_TORCH_CLASSES = (
    "torch.amp.",
    "torch.cuda.amp.",
    "torch.distributions.",
    "torch.nn.",
    "torch.optim.",
    "torch.utils.data.",
)
_NUMPY_SCALARS = frozenset(
    [
        "bool",
        "bool_",
        "float16",
        "float32",
        "float64",
        "int8",
        "int16",
        "int32",
        "int64",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "complex64",
        "complex128",
        "str_",
        "bytes_",
    ]
)


def judge(module: str, name: str, known: Holds[str]) -> tuple[str, bool]:
    """Allow a global, or refuse the file.

    Args:
        module: As the pickle spells it; Python 2 and old numpy spellings are understood.
        name: May be dotted.
        known: Qualified names that our own code rebuilds.

    Returns:
        Its qualified name, never the object itself; and whether it may be called, for a file that calls another one
        is refused.
    """
    spelt = f"{module}.{name}"
    if len(spelt) > 500 or not all(part.isidentifier() for part in spelt.split(".")):
        raise Refused("is damaged: a global in it is not a Python name")
    if (module, name) in NAME_MAPPING:
        module, name = NAME_MAPPING[module, name]
    module = IMPORT_MAPPING.get(module, module)
    if module == "numpy._core" or module.startswith("numpy._core."):
        module = "numpy.core" + module.removeprefix("numpy._core")
    qualified = f"{module}.{name}"
    if qualified == "torch._utils._rebuild_qtensor":
        raise Refused("holds quantised tensors, which are not read; save the network before it is quantised")
    if qualified in known or qualified in _INERT or _is_foreign_class(module, name):
        return qualified, True
    if _is_reference(module, name):
        return qualified, False
    raise acting(spelt)


def acting(name: str) -> Refused:
    """The refusal of a file that would act."""
    return Refused(
        f"is refused: it asks to run {name}, which no checkpoint needs; do not load it with "
        "another tool unless you trust where it comes from"
    )


def _is_reference(module: str, name: str) -> bool:
    """Whether a name is that of a function which ordinary files mention without calling it."""
    top = module.partition(".")[0]
    if any(part in sys.stdlib_module_names for part in name.split(".")):
        return False
    return top in _INSTALLED or module == "torch.nn.functional"


def _is_foreign_class(module: str, name: str) -> bool:
    """Whether a name, as a stub, is fit to be kept as data."""
    top = module.partition(".")[0]
    parts = name.split(".")
    looks_like_class = parts[-1].lstrip("_")[:1].isupper()
    if top in _ACTING or any(part in sys.stdlib_module_names for part in (top, *parts)):
        return False
    if top == "torch":
        return looks_like_class and f"{module}.".startswith(_TORCH_CLASSES)
    if top == "numpy":
        if module == "numpy":
            return name in _NUMPY_SCALARS
        return module == "numpy.random._pickle" or (looks_like_class and module.startswith("numpy.random."))
    return looks_like_class or top not in _INSTALLED
