"""The error tree: every class has a fault, an exit code of `txnbuf`, and a docstring."""

import copy
import importlib
import inspect
import pickle
import pkgutil
import threading
from collections.abc import Callable

import pytest

import broker_io
import snapshots
import txnbuffer
from broker_io import errors as root
from broker_io.errors import Error, Fault
from broker_io.position import Position
from txnbuffer.model import TxnId
from txnbuffer.pipeline.delta import ExportChanged
from txnbuffer.pipeline.exports import UnreadableExport
from txnbuffer.pipeline.jobs.running import JobFailed

EXIT_CODES = {Fault.CALLER: 2, Fault.PEER: 3, Fault.STORAGE: 4, Fault.ENVIRONMENT: 5}
SIDES = {Fault.CALLER: root.CallerError, Fault.PEER: root.PeerError, Fault.STORAGE: root.StorageError}
GRPC_STATUSES = {
    "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
    "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
    "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED",
}  # fmt: skip


def error_classes() -> list[type[BaseException]]:
    """Every exception that a module named `errors` of the product defines."""
    found: list[type[BaseException]] = []
    for package in (broker_io, snapshots, txnbuffer):
        for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if info.name.rpartition(".")[2] == "errors":
                module = importlib.import_module(info.name)
                members = (value for _, value in inspect.getmembers(module, inspect.isclass))
                found += [cls for cls in members if issubclass(cls, BaseException) and cls.__module__ == info.name]
    return found


ERRORS = error_classes()
OTHERS = [UnreadableExport, JobFailed, ExportChanged]
"""Errors of other modules that the API has."""
ARGUMENTS = {
    "asked": 3, "applied": Position(1, 2, -1), "epoch": 4, "error": root.Damaged("f", 1, "torn"), "exit_code": 3,
    "first": 5, "first_ledger": 6, "last": 7, "limit": "limits.sessions", "needed": True, "number": 8, "offset": 9,
    "position": Position(3, 4, 5), "retry_after": 2.5, "retryable": True, "seqno": 10, "status": 409,
    "txn": TxnId(1, 23),
}  # fmt: skip
"""Arguments of constructors that are no texts."""


def made(cls: type[BaseException]) -> Error:
    """An error of this class, with an argument for each parameter of its constructor."""
    if "__init__" not in {name for base in cls.__mro__ if base not in Exception.__mro__ for name in vars(base)}:
        error = cls("a text")
    else:
        parameters = inspect.signature(cls).parameters.values()
        given = [(one, ARGUMENTS.get(one.name, f"a {one.name}")) for one in parameters]
        named = {one.name: value for one, value in given if one.kind is one.KEYWORD_ONLY}
        error = cls(*(value for one, value in given if one.kind is not one.KEYWORD_ONLY), **named)
    assert isinstance(error, Error)
    return error


def test_error_classes_are_found() -> None:
    assert {root.Error, root.Damaged, root.Fenced} <= set(ERRORS)


@pytest.mark.parametrize("cls", ERRORS, ids=lambda cls: cls.__name__)
def test_every_error_derives_from_the_root_and_is_complete(cls: type[BaseException]) -> None:
    assert issubclass(cls, Error)
    assert cls.__doc__
    assert cls.grpc_status in GRPC_STATUSES
    if cls is not Error:
        assert cls.exit_code == EXIT_CODES[cls.fault]


@pytest.mark.parametrize("fault", SIDES, ids=lambda fault: fault.name)
def test_branch_of_the_tree_has_one_fault(fault: Fault) -> None:
    for cls in ERRORS:
        if issubclass(cls, SIDES[fault]):
            assert cls.fault is fault


def test_every_exported_error_is_among_them() -> None:
    exported = [getattr(txnbuffer, name) for name in txnbuffer.__all__]
    errors = {one for one in exported if isinstance(one, type) and issubclass(one, BaseException)}
    assert len(errors) > 30
    assert errors <= {*ERRORS, *OTHERS}


def test_names_of_errors_are_unique() -> None:
    names = [cls.__name__ for cls in ERRORS]
    assert len(names) == len(set(names))


def test_damaged_names_the_file_and_the_offset() -> None:
    error = root.Damaged("topics/1/1-0.log", 4096, "checksum of the block does not fit")
    assert str(error) == "topics/1/1-0.log, offset 4096: checksum of the block does not fit"
    assert (error.path, error.offset, error.what) == ("topics/1/1-0.log", 4096, "checksum of the block does not fit")


WAYS: dict[str, Callable[[Error], Error]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda error: pickle.loads(pickle.dumps(error)),  # type: ignore[no-any-return]  # pickle is untyped
    "pickle, protocol 0": lambda error: pickle.loads(pickle.dumps(error, 0)),  # type: ignore[no-any-return]  # as above
}


class TestCopies:
    """Errors that are pickled, as between processes, or copied."""

    @pytest.mark.parametrize("way", WAYS)
    @pytest.mark.parametrize("cls", [*ERRORS, *OTHERS], ids=lambda cls: cls.__name__)
    def test_an_error_keeps_text_attributes_cause_and_notes(self, cls: type[Error], way: str) -> None:
        error = made(cls)
        error.__cause__ = root.Damaged("a file", 7, "torn")
        error.__cause__.__cause__ = KeyError("root")
        error.add_note("a note")
        found = WAYS[way](error)
        assert type(found) is cls
        assert (str(found), found.args, vars(found)) == (str(error), error.args, vars(error))
        assert found.__notes__ == ["a note"]
        assert isinstance(found.__cause__, root.Damaged)
        assert vars(found.__cause__) == {"path": "a file", "offset": 7, "what": "torn"}
        assert repr(found.__cause__.__cause__) == "KeyError('root')"
        assert found.__suppress_context__

    @pytest.mark.parametrize("way", WAYS)
    def test_an_error_without_cause_keeps_showing_its_context(self, way: str) -> None:
        found = WAYS[way](Error("alone"))
        assert found.__cause__ is None
        assert not found.__suppress_context__

    def test_a_cause_that_cannot_be_pickled_or_read_back_is_an_error_with_its_text(self) -> None:
        for cause in (ValueError("of a lock", threading.Lock()), Unreadable(1, 2)):
            error = Error("outer")
            error.__cause__ = cause
            found = pickle.loads(pickle.dumps(error)).__cause__
            assert type(found) is Error
            assert str(found) == f"{type(cause).__name__}: {cause}"
            assert copy.copy(error).__cause__ is cause

    def test_an_error_that_is_its_own_cause_can_be_pickled(self) -> None:
        error = Error("outer")
        error.__cause__ = error
        assert str(pickle.loads(pickle.dumps(error))) == "outer"


class Unreadable(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__(f"{first} and {second}")
