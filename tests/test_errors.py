"""The error tree: every class has a fault, an exit code of `txnbuf`, and a docstring."""

import importlib
import inspect
import pkgutil

import pytest

import broker_io
import snapshots
import txnbuffer
from broker_io import errors as root
from broker_io.errors import Error, Fault

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


def test_names_of_errors_are_unique() -> None:
    names = [cls.__name__ for cls in ERRORS]
    assert len(names) == len(set(names))


def test_damaged_names_the_file_and_the_offset() -> None:
    error = root.Damaged("topics/1/1-0.log", 4096, "checksum of the block does not fit")
    assert str(error) == "topics/1/1-0.log, offset 4096: checksum of the block does not fit"
    assert (error.path, error.offset, error.what) == ("topics/1/1-0.log", 4096, "checksum of the block does not fit")
