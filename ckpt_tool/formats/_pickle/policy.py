"""Which names no checkpoint has a reason to ask for.

Nothing that a pickle names is ever imported or called here, so this list protects whoever opens the same file with
something else: a file that asks for one of these is reported, with the byte where it asks. Names that are merely
unknown are not refused.
"""

from __future__ import annotations

__all__ = ["canonical_module", "refusal"]

# Protocols 0 to 2 use the module names of Python 2 (pickle's _compat_pickle).
_PYTHON2_MODULES = {"__builtin__": "builtins", "copy_reg": "copyreg", "cPickle": "pickle", "commands": "subprocess"}

# A module here stands for everything below it.
_MODULES = frozenset(
    """
    os posix nt subprocess _posixsubprocess sys shutil socket _socket socketserver ssl importlib imp pkgutil
    zipimport runpy ctypes _ctypes cffi pickle _pickle pickletools shelve marshal codeop pty tty webbrowser
    antigravity multiprocessing _multiprocessing concurrent threading _thread asyncio pip setuptools ensurepip venv
    timeit cProfile pdb bdb doctest pydoc idlelib http urllib ftplib smtplib telnetlib poplib imaplib nntplib xmlrpc
    requests httpx aiohttp paramiko tempfile fileinput linecache mmap fcntl atexit gc rlcompleter distutils joblib
    dill numpy.f2py numpy.distutils numpy.testing._private.utils numpy.ctypeslib torch.hub torch._dynamo
    torch._inductor torch.utils.cpp_extension torch.utils.collect_env torch.utils.bottleneck torch.package
    torch.distributed.run torch.distributed.elastic pandas.io IPython jedi pexpect ptyprocess fabric
    """.split()  # noqa: SIM905 a list of two hundred quoted names reads worse
)

_NAMES = frozenset(
    """
    code.interact code.InteractiveConsole code.InteractiveInterpreter code.compile_command profile.run
    profile.runctx profile.Profile trace.Trace sched.scheduler builtins.eval builtins.exec builtins.compile
    builtins.open builtins.__import__ builtins.input builtins.breakpoint builtins.execfile builtins.file
    builtins.reload builtins.raw_input builtins.apply builtins.globals builtins.locals builtins.vars
    builtins.setattr builtins.delattr builtins.help builtins.exit builtins.quit builtins.dir
    builtins.__build_class__ builtins.memoryview builtins.map builtins.filter io.open io.FileIO io.open_code
    _io.open _io.FileIO codecs.open operator.attrgetter operator.methodcaller operator.itemgetter
    _operator.attrgetter _operator.methodcaller _operator.itemgetter types.CodeType types.FunctionType
    functools.reduce signal.signal logging.config.dictConfig logging.config.fileConfig torch.load torch.save
    torch.serialization.load torch.serialization._load torch.serialization._legacy_load torch.jit.load
    torch.jit.script torch.jit._script torch.ops.load_library torch._ops.load_library torch.classes.load_library
    torch.utils.data.graph.traverse torch.storage._load_from_bytes
    torch.distributed.distributed_c10d._object_to_tensor torch.distributed.distributed_c10d._tensor_to_object
    torch.fx._symbolic_trace.symbolic_trace torch.fx.graph_module.reduce_graph_module
    torch.fx.graph_module.reduce_package_graph_module torch.fx.graph_module._exec_with_source
    torch.fx.graph_module._forward_from_src numpy.load numpy.fromfile numpy.memmap numpy.genfromtxt numpy.loadtxt
    numpy.save numpy.savez numpy.lib.npyio.load numpy.core.memmap.memmap numpy._core.memmap.memmap
    pandas.read_pickle pandas.eval cloudpickle.loads cloudpickle.load cloudpickle.cloudpickle.loads yaml.load
    yaml.unsafe_load yaml.full_load
    """.split()  # noqa: SIM905 a list of two hundred quoted names reads worse
)

# Modules that attack chains reach through the attributes of others (`torch.serialization` -> `os.system`).
_REACHED = frozenset(
    {"os", "posix", "nt", "sys", "subprocess", "builtins", "importlib", "shutil", "socket", "ctypes", "runpy", "pty"}
)

# Plain data among names that are refused: pickles of every protocol, and of jagged tensors (torch 2.13), ask for these.
_HARMLESS = frozenset({"copyreg.__newobj__", "copyreg.__newobj_ex__", "torch._dynamo.decorators._DimRange"})


def canonical_module(module: str) -> str:
    """The present name of a module that Python 2 called otherwise.

    >>> canonical_module("__builtin__"), canonical_module("torch._utils")
    ('builtins', 'torch._utils')
    """
    return _PYTHON2_MODULES.get(module, module)


def refusal(module: str, name: str) -> str | None:
    """Why ``module.name`` is refused, None when it may be named.

    >>> refusal("posix", "system")
    'can run code or reach outside the file'
    >>> refusal("torch._utils", "_rebuild_tensor_v2") is None
    True
    """
    qualified = f"{module}.{name}"
    if qualified in _HARMLESS:
        return None
    if _is_below(module, _MODULES) or _is_below(qualified, _NAMES):
        return "can run code or reach outside the file"
    parts = qualified.split(".")
    if any(part in _REACHED for part in parts[1:-1]) or any(part in _REACHED for part in name.split(".")[:-1]):
        return "reaches a module that can run code through another"
    if any(_is_dunder(part) for part in name.split(".")):
        return "reaches into the interpreter"
    return None


def _is_below(dotted: str, refused: frozenset[str]) -> bool:
    """True when ``dotted`` or something that contains it is in ``refused``."""
    while dotted:
        if dotted in refused:
            return True
        dotted = dotted.rpartition(".")[0]
    return False


def _is_dunder(part: str) -> bool:
    return len(part) > 4 and part.startswith("__") and part.endswith("__")
