"""Pickles that mean harm: those that call what acts, and those that lie, nest or make no sense."""

from __future__ import annotations

import struct
from pathlib import Path

from assembling import call, glob, in_dict, integers, storage, tensor, text

Bodies = dict[str, bytes]
Named = dict[str, tuple[str, bytes]]  # the global that the refusal must name, and a pickle


def _system_calls(canary: Path) -> Named:
    shell = text(f"touch {canary}")
    code = text(f"open({str(canary)!r}, 'w').close()")
    return {
        "os_system": ("os.system", shell),
        "posix_system": ("posix.system", shell),
        "nt_system": ("nt.system", shell),
        "eval": ("builtins.eval", code),
        "exec": ("builtins.exec", code),
        "py2_eval": ("__builtin__.eval", code),
        "py2_execfile": ("__builtin__.execfile", text(str(canary))),
        "import": ("builtins.__import__", text("os")),
        "open": ("builtins.open", text(str(canary)) + text("w")),
        "compile": ("builtins.compile", code + text("x") + text("exec")),
        "type": ("builtins.type", text("X") + b")}"),
        "popen": ("subprocess.Popen", b"]" + shell + b"a"),
        "check_output": ("subprocess.check_output", b"]" + text("touch") + b"a" + text(str(canary)) + b"a"),
        "py2_commands": ("commands.getoutput", shell),
        "runpy": ("runpy.run_path", text(str(canary))),
        "import_module": ("importlib.import_module", text("os")),
        "rmtree": ("shutil.rmtree", text(str(canary.parent))),
        "socket": ("socket.create_connection", text("localhost")),
    }


def _library_calls(canary: Path) -> Named:
    shell = text(f"touch {canary}")
    code = text(f"open({str(canary)!r}, 'w').close()")
    return {
        "pickle_loads": ("pickle.loads", b"C\x01."),
        "unpickler": ("_pickle.loads", b"C\x01."),
        "interpreter": ("code.interact", b""),
        "ctypes": ("ctypes.CDLL", text("libc.so.6")),
        "methodcaller": ("operator.methodcaller", text("system") + shell),
        "attrgetter": ("operator.attrgetter", text("system")),
        "webbrowser": ("webbrowser.open", text("http://localhost")),
        "pty": ("pty.spawn", text("sh")),
        "timeit": ("timeit.timeit", code),
        "profile": ("cProfile.run", code),
        "sys_modules": ("sys.modules", b""),
        "threading": ("threading.Timer", b"K\x00" + glob("mylab.config", "Config")),
        "logging": ("logging.FileHandler", text(str(canary))),
        "copyreg_add": ("copyreg.add_extension", text("os") + text("system") + b"K\x01"),
        "codecs_open": ("_codecs.lookup", text("zip")),
    }


def _package_calls(canary: Path) -> Named:
    shell = text(f"touch {canary}")
    code = text(f"open({str(canary)!r}, 'w').close()")
    return {
        "torch_hub": ("torch.hub.load", text("x") + text("y")),
        "torch_load": ("torch.load", text(str(canary))),
        "torch_load_bytes": ("torch.storage._load_from_bytes", b"C\x01."),
        "torch_jit": ("torch.jit.load", text(str(canary))),
        "torch_run": ("torch.utils.collect_env.run", shell),
        "torch_cpp": ("torch.utils.cpp_extension.load_inline", text("x") + code),
        "torch_save": ("torch.save", b"K\x00" + text(str(canary))),
        "torch_nn_function": ("torch.nn.init.ones_", b"K\x00"),
        "numpy_load": ("numpy.load", text(str(canary))),
        "numpy_runstring": ("numpy.testing._private.utils.runstring", code + b"}"),
        "numpy_save": ("numpy.save", text(str(canary)) + b"K\x00"),
        "numpy_dotted": ("numpy.core.multiarray.os.system", shell),
        "pip": ("pip.main", b"]"),
        "setuptools": ("setuptools.setup", b""),
        "dill_code": ("dill._dill._create_code", b"K\x00"),
        "dill_import": ("dill._dill._import_module", text("os")),
        "cloudpickle": ("cloudpickle.cloudpickle._builtin_type", text("CodeType")),
        "hub_download": ("huggingface_hub.hf_hub_download", text("x") + text("y")),
        "yaml": ("yaml.unsafe_load", text("x")),
    }


def _detours(canary: Path) -> Named:
    """The same aims by longer ways."""
    shell = text(f"touch {canary}")
    os_module = call(glob("builtins", "__import__"), text("os"))
    made: Named = {}
    getattr_ = glob("builtins", "getattr")
    made["partial"] = ("os.system", call(glob("functools", "partial"), glob("os", "system"), shell))
    made["partial_called"] = (
        "huggingface_hub.hf_hub_download",
        call(glob("functools", "partial"), call(glob("huggingface_hub", "hf_hub_download"), text("x"))),
    )
    made["getattr_chain"] = ("builtins.__import__", call(call(getattr_, os_module, text("system")), shell))
    made["getattr_stub"] = ("builtins.getattr", call(getattr_, glob("mylab", "Net"), text("__init__")))
    nested = call(glob("mylab", "Net"), call(glob("mylab", "Net"), call(glob("os", "system"), shell)))
    made["nested_reducers"] = ("os.system", nested)
    made["stub_state"] = (
        "os.system",
        call(glob("mylab", "Net")) + b"}" + text("__setstate__") + glob("os", "system") + b"sb",
    )
    made["stack_global"] = ("os.system", text("os") + text("system") + b"\x93(" + shell + b"tR")
    made["stack_global_dotted"] = ("mylab.os.system", text("mylab") + text("os.system") + b"\x93(" + shell + b"tR")
    return made


def _opcodes(canary: Path) -> Named:
    """The same aims by other opcodes and through our own rebuilders."""
    shell = text(f"touch {canary}")
    made: Named = {}
    made["inst"] = ("os.system", b"(" + shell + b"ios\nsystem\n")
    made["obj"] = ("os.system", b"(" + glob("os", "system") + shell + b"o")
    made["newobj"] = ("subprocess.Popen", glob("subprocess", "Popen") + b"(" + shell + b"t\x81")
    made["newobj_ex"] = ("subprocess.Popen", glob("subprocess", "Popen") + b"(" + shell + b"t}\x92")
    made["default_factory"] = ("os.getpid", call(glob("collections", "defaultdict"), glob("os", "getpid")))
    made["reconstructor"] = (
        "os._wrap_close",
        call(glob("copyreg", "_reconstructor"), glob("os", "_wrap_close"), b"NN"),
    )
    made["rebuild_from_type"] = (
        "os.system",
        call(glob("torch._tensor", "_rebuild_from_type_v2"), glob("os", "system"), b"N(" + shell + b"tN"),
    )
    made["codec"] = ("_codecs.encode", call(glob("_codecs", "encode"), text("x"), text("zip")))
    return made


def acting_calls(canary: Path) -> Named:
    """Every pickle that would act, by name."""
    made = _detours(canary) | _opcodes(canary)
    plain = _system_calls(canary) | _library_calls(canary) | _package_calls(canary)
    for name, (target, args) in plain.items():
        module, _, last = target.rpartition(".")
        made[name] = (target, call(glob(module, last), args))
    return made


def _nested() -> Bodies:
    """Containers without end, and the extension registry."""
    laughs = b"]" + b"".join(b"q%c0](" % i + b"h%c" % i * 10 + b"e" for i in range(30))
    again = glob("torch._tensor", "_rebuild_from_type_v2")
    return {
        "extension": in_dict(b"\x82\x01"),
        "extension4": in_dict(b"\x84\x01\0\0\0"),
        "laughs": in_dict(laughs),
        "laughs_in_tuples": in_dict(b"N" + b"".join(b"q%c0(" % i + b"h%c" % i * 10 + b"t" for i in range(60))),
        "deep_lists": in_dict(b"]" * 200_000 + b"a" * 199_999),
        "deep_tuples": in_dict(b")" + b"\x85" * 200_000),
        "deep_key": b"})" + b"\x85" * 200_000 + b"Ns",
        "deep_rebuild": in_dict(again + (b"(" + again + b"N") * 20_000 + b")" + b"Nt" * 20_000 + b"R"),
        "self_reference": in_dict(b"]q\x00h\x00a"),
        "self_dict": b"}q\x00" + text("a") + b"h\x00s",
    }


def _claims() -> Bodies:
    """Lengths that the file does not have."""
    big = 2**31 - 1
    return {
        "long_claim": in_dict(b"\x8b" + struct.pack("<i", big)),
        "long_negative": in_dict(b"\x8b" + struct.pack("<i", -5)),
        "bytes_claim": in_dict(b"\x8e" + struct.pack("<Q", 2**62)),
        "text_claim": in_dict(b"\x8d" + struct.pack("<Q", 2**40)),
        "bytearray_claim": in_dict(b"\x96" + struct.pack("<Q", 2**63 + 1)),
        "memo_claim": in_dict(b"Nr" + struct.pack("<I", 2**32 - 1) + b"j\0\0\0\0"),
        "frame_only": b"\x95" + struct.pack("<Q", 2**60),
        "many_digits": in_dict(b"L" + b"9" * 100_000 + b"L\n"),
        "bytearray_length": in_dict(call(glob("builtins", "bytearray"), b"J" + struct.pack("<i", big))),
        "bytes_length": in_dict(call(glob("builtins", "bytes"), b"J" + struct.pack("<i", big))),
    }


def _unfolding() -> Bodies:
    """Small files that would become large or slow."""
    latin = glob("_codecs", "encode")
    one, two = b"J\xff\xff\xff\xff", b"J\xfe\xff\xff\xff"  # -1 and -2 have the same hash
    colliding = [b"".join(one if i >> b & 1 else two for b in range(15)) for i in range(2**15)]
    return {
        "sets_of_one_list": in_dict(
            b"]("
            + b"".join(b"J" + struct.pack("<i", i) for i in range(20_000))
            + b"eq\x000("
            + call(glob("builtins", "set"), b"h\x00") * 20_000
            + b"l"
        ),
        "colliding_tuples": b"}(" + b"".join(b"(" + keys + b"tN" for keys in colliding) + b"u",
        "encode_again_and_again": in_dict(
            text("a" * 60_000) + b"q\x00(" + call(glob("_codecs", "encode"), b"h\x00", text("latin1")) * 20_000 + b"l"
        ),
        "millions_of_dicts": in_dict(b"(" + b"}" * 5_000_000 + b"l"),
        "encode_long_again": in_dict(
            text("a" * 100_000) + b"q\x00(" + call(latin, b"h\x00", text("latin1")) * 20_000 + b"l"
        ),
    }


def _tensors() -> Bodies:
    """Tensors and storages that lie."""
    return {
        "persistent_text": in_dict(b"Pstorage\n"),
        "persistent_path": in_dict(storage(key="../../../etc/passwd")),
        "persistent_absent": in_dict(storage(key="7")),
        "persistent_kind": in_dict(storage(kind="QInt8Storage")),
        "persistent_nothing": in_dict(b"NQ"),
        "storage_lies": in_dict(tensor(storage(count=2**40), 0, integers(2**20), integers(1))),
        "size_lies": in_dict(tensor(storage(), 0, integers(2**38), integers(1))),
        "size_lies_a_little": in_dict(tensor(storage(), 0, integers(5), integers(1))),
        "size_overflows": in_dict(tensor(storage(), 0, integers(2**33, 2**33), integers(1, 1))),
        "offset_lies": in_dict(tensor(storage(), 4, integers(1), integers(1))),
        "offset_negative": in_dict(tensor(storage(), -1, integers(1), integers(1))),
        "stride_lies": in_dict(tensor(storage(), 0, integers(2, 2), integers(4, 1))),
        "stride_negative": in_dict(tensor(storage(), 3, integers(4), integers(-1))),
        "stride_zero": in_dict(tensor(storage(), 0, integers(2**30), integers(0))),
        "stride_missing": in_dict(tensor(storage(), 0, integers(2, 2), integers(1))),
        "size_negative": in_dict(tensor(storage(), 0, integers(-2), integers(1))),
        "tensor_of_nothing": in_dict(tensor(b"N", 0, integers(2), integers(1))),
        "two_types": in_dict(b"(" + storage() + storage("HalfStorage") + b"l"),
    }


def _array(shape: bytes, code: str, data: bytes) -> bytes:
    made = call(glob("numpy.core.multiarray", "_reconstruct"), glob("numpy", "ndarray"), b"K\x00\x85C\x01b")
    state = b"(K\x03" + text("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK?tb"
    dtype = call(glob("numpy", "dtype"), text(code), b"\x89\x88") + state
    return in_dict(made + b"(K\x01" + shape + dtype + b"\x89" + data + b"tb")


def _arrays() -> Bodies:
    """Arrays of objects, and arrays that lie."""
    return {
        "object_array": _array(b"K\x01\x85", "O8", b"](" + glob("os", "system") + b"e"),
        "object_array_bytes": _array(b"K\x01\x85", "O8", b"C\x08" + bytes(8)),
        "inner_pickle": _array(b"K\x01\x85", "V8", b"C\x08" + bytes(8)),
        "array_lies": _array(integers(2**20, 2**18), "f4", b"C\x04" + bytes(4)),
        "array_negative": _array(integers(-1), "f4", b"C\x04" + bytes(4)),
        "array_list": _array(b"K\x01\x85", "f4", b"](K\x01e"),
    }


def _nonsense() -> Bodies:
    """Pickles that no pickler writes."""
    ordered = glob("collections", "OrderedDict")
    return {
        "build_on_string": in_dict(text("x") + b"}b"),
        "append_to_string": in_dict(text("x") + b"Na"),
        "call_a_string": in_dict(text("x") + b")R"),
        "call_without_tuple": in_dict(ordered + b"NR"),
        "empty_stack": b"0000R",
        "no_mark": b"t",
        "only_a_list": b"]",
        "only_a_stub": call(glob("mylab.config", "Config")),
        "outside_buffer": in_dict(b"\x97"),
        "opcode": in_dict(b"\xff"),
        "protocol": b"\x80\x09N",
        "no_name": b"c\n\n)R",
        "strange_name": b"cmylab config\nConfig; import os\n)R",
    }


def pickle_bodies() -> Bodies:
    """Bodies that name nothing that acts, and lie, nest, or make no sense instead."""
    return _nested() | _claims() | _unfolding() | _tensors() | _arrays() | _nonsense()
