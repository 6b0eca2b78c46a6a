"""Fragments to executables: each distinct one once per mesh, several at a time.

Reasons why fragments have no native code, and the one warning that lists them.
"""

from __future__ import annotations

import contextvars
import dataclasses
import logging
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from mpmd.brief import seconds_text
from mpmd.compile.backends.mixed import MixedBackend, MixedExecutable
from mpmd.compile.backends.target_backend import LoadError, TargetBackend, TracedTargetBackend
from mpmd.compile.backends.targets import AUTOMATIC, EVERYWHERE, NATIVE, MakeBackend
from mpmd.compile.backends.xla import XlaBackend, XlaExecutable
from mpmd.compile.backends.zeros import ZerosExecutable, makes_only_zeros
from mpmd.compile.executable import Backend, Executable
from mpmd.compile.fragment import FragmentModule
from mpmd.compile.kernels.planner.plan_cache import caching_plans
from mpmd.compile.options import DEFAULTS, CompileOptions
from mpmd.compile.thunks.check import compiler_failure, write_report
from mpmd.errors import CompileError, HloError, MiscompiledError
from mpmd.support.progress import ProgressLine
from mpmd.support.user_code import PendingWarning

_MAX_NAMES = 8

log = logging.getLogger("mpmd.compile")


def fallback_warning(executables: Mapping[str, Executable]) -> PendingWarning:
    """One warning for all fragments that XLA compiles although native code was requested, with reasons."""
    groups: dict[tuple[str, tuple[str, ...]], list[str]] = {}
    for name, executable in executables.items():
        reasons = tuple(getattr(executable, "reasons", ()))
        if reasons:
            part = "in part" if isinstance(executable, MixedExecutable) else "as a whole"
            groups.setdefault((part, reasons), []).append(f"{name} on {executable.fragment.mesh}")
    lines = []
    for (part, reasons), names in groups.items():
        more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
        what = "fragment" if len(names) == 1 else "fragments"
        verb = "is" if len(names) == 1 else "are"
        lines.append(f"{what} {', '.join(names[:_MAX_NAMES])}{more} {verb} compiled by XLA {part}:")
        lines += [f"  {reason}" for reason in reasons]
    return PendingWarning("\n".join(lines))


@dataclasses.dataclass(frozen=True)
class FallbackBackend:
    """Code of a target where it is supported, and XLA's, counted and with the reason, where it is not.

    Attributes:
        first: the backend of the target.
    """

    first: TargetBackend

    @property
    def name(self) -> str:
        return self.first.name

    def compile(self, fragment: FragmentModule, mesh: Any) -> Executable:
        """Compiles for the devices of a mesh; see `Backend`."""
        unfit = self.first.unfit(fragment, mesh)
        if unfit:
            return self._by_xla(fragment, mesh, (unfit,))
        try:
            return _compiled(self.first, fragment, mesh)
        except MiscompiledError as error:
            return self._miscompiled(fragment, mesh, error)
        except LoadError as error:
            return self._by_xla(fragment, mesh, tuple(str(error).splitlines()))
        except CompileError as error:
            refused = error
        if not isinstance(self.first, TracedTargetBackend) or not self.first.may_split(mesh):
            return self._by_xla(fragment, mesh, tuple(str(refused).splitlines()[:1]))
        try:
            return _compiled(MixedBackend(self.first), fragment, mesh)
        except MiscompiledError as error:
            return self._miscompiled(fragment, mesh, error)
        except CompileError as error:
            reasons = str(error).splitlines() or str(refused).splitlines()[:1]
            return self._by_xla(fragment, mesh, tuple(reasons))

    def _miscompiled(self, fragment: FragmentModule, mesh: Any, error: MiscompiledError) -> XlaExecutable:
        """Reports a fault of the native backend; no code of it is run."""
        path = write_report(fragment, error, self.first.options.dump)
        reasons = (
            f"{error.reason}; the results of XLA are right",
            f"please report this; the text of the program is in {path}",
        )
        return self._by_xla(fragment, mesh, reasons)

    def _by_xla(self, fragment: FragmentModule, mesh: Any, reasons: tuple[str, ...]) -> XlaExecutable:
        return dataclasses.replace(XlaBackend().compile(fragment, mesh), reasons=reasons)

    def relocate(self, executable: Any, fragment: FragmentModule, mesh: Any) -> Executable | None:
        """Loads the target's or XLA's code onto another mesh; see `Backend`."""
        if isinstance(executable, MixedExecutable):
            assert isinstance(self.first, TracedTargetBackend)
            return MixedBackend(self.first).relocate(executable, fragment, mesh)
        if isinstance(executable, XlaExecutable):
            return XlaBackend().relocate(executable, fragment, mesh)
        try:
            return self.first.relocate(executable, fragment, mesh)
        except CompileError:  # compiling it again says why, and XLA takes over
            return None


_FAULTS = HloError, ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError, TypeError


def _compiled(backend: Backend, fragment: FragmentModule, mesh: Any) -> Executable:
    """Compiles a fragment.

    Raises:
        CompileError: the backend does not support it.
        MiscompiledError: the compiler itself is at fault.
    """
    try:
        return backend.compile(fragment, mesh)
    except _FAULTS as failure:
        raise compiler_failure(fragment) from failure


@dataclasses.dataclass(frozen=True)
class PlatformBackend:
    """Code of the target of a mesh's platform, XLA's where there is none.

    Attributes:
        targets: platform → its target.
        other: the target for other platforms; it says why it has no code for them.
        options: the compile options.
        name: as users choose it.
    """

    targets: Mapping[str, MakeBackend]
    other: MakeBackend | None = None
    options: CompileOptions = DEFAULTS
    name: str = "auto"

    def compile(self, fragment: FragmentModule, mesh: Any) -> Executable:
        """Compiles for the devices of a mesh; see `Backend`."""
        return self.of(mesh).compile(fragment, mesh)

    def relocate(self, executable: Any, fragment: FragmentModule, mesh: Any) -> Executable | None:
        """Loads an executable onto another mesh; see `Backend`."""
        return self.of(mesh).relocate(executable, fragment, mesh)

    def of(self, mesh: Any) -> Backend:
        target = self.targets.get(mesh.devices.flat[0].platform, self.other)
        return XlaBackend() if target is None else FallbackBackend(target(mesh, self.options))


BACKENDS = ("auto", "native", *EVERYWHERE, "xla")


def get_backend(name: str, options: CompileOptions = DEFAULTS) -> Backend:
    """A backend by its name, which follows the options as far as it can.

    Raises:
        CompileError: there is none of that name.
    """
    if name not in BACKENDS:
        raise CompileError(
            f"there is no compile backend {name!r}\n  there are {', '.join(map(repr, BACKENDS))}"
        )
    if name == "xla":
        return XlaBackend()
    if name == "auto":
        return PlatformBackend({platform: NATIVE[platform] for platform in AUTOMATIC}, options=options)
    if name == "native":
        return PlatformBackend(NATIVE, NATIVE["cpu"], options, name)
    return PlatformBackend({}, EVERYWHERE[name], options, name)


def compile_fragments(
    fragments: Mapping[str, FragmentModule],
    meshes: Mapping[str, Any],
    backend: str,
    options: CompileOptions = DEFAULTS,
) -> dict[str, Executable]:
    """Compiles every fragment for its mesh; one that only differs in its mesh from another is loaded from it.

    Fragments that XLA compiles instead of native code have the reason; `fallback_warning` collects them.

    Args:
        fragments: by name.
        meshes: by name.
        backend: name of the backend.
        options: the compile options.

    Raises:
        CompileError: one cannot be compiled.
    """
    chosen = get_backend(backend, options)
    executables: dict[str, Executable] = {}
    workers = ThreadPoolExecutor(max_workers=os.cpu_count() or 1)
    with caching_plans(), ProgressLine("compiling") as progress, workers as pool:
        here = contextvars.copy_context()
        groups = pool.map(
            lambda names: here.copy().run(_compile_alike, chosen, [fragments[n] for n in names], meshes),
            alike(fragments, meshes),
        )
        for group in groups:
            executables.update((executable.name, executable) for executable in group)
            progress.show("fragments", len(executables), len(fragments))
    return {name: executables[name] for name in fragments}


def alike(fragments: Mapping[str, FragmentModule], meshes: Mapping[str, Any]) -> list[list[str]]:
    """Groups of identical fragments: the names of those with equal code, on meshes of one shape."""
    groups: dict[Hashable, list[str]] = {}
    for name, fragment in fragments.items():
        shape = tuple(meshes[fragment.mesh].shape.items())
        groups.setdefault((fragment.fingerprint, shape), []).append(name)
    return list(groups.values())


def programs(fragments: Mapping[str, FragmentModule], meshes: Mapping[str, Any]) -> list[list[str]]:
    """The distinct programs to compile: for each the names of its fragments."""
    groups = alike(fragments, meshes)
    firsts = [fragments[names[0]] for names in groups]
    return [n for n, f in zip(groups, firsts, strict=True) if not makes_only_zeros(f, meshes[f.mesh])]


def _compile_alike(
    backend: Backend, fragments: Sequence[FragmentModule], meshes: Mapping[str, Any]
) -> list[Executable]:
    """Executables of fragments with one fingerprint, on meshes of one shape."""
    most = max(f.reserved_bytes for f in fragments)  # one program for all: it must fit everywhere
    first, *others = [dataclasses.replace(f, reserved_bytes=most) for f in fragments]
    if makes_only_zeros(first, meshes[first.mesh]):
        return [ZerosExecutable(fragment, meshes[fragment.mesh]) for fragment in fragments]
    begin = time.perf_counter()
    executables = [backend.compile(first, meshes[first.mesh])]
    took = seconds_text(time.perf_counter() - begin)
    more = f", and {len(others)} like it" if others else ""
    log.debug(
        "%s compiled %s for mesh %s in %s%s", executables[0].backend, first.name, first.mesh, took, more
    )
    for fragment in others:
        mesh = meshes[fragment.mesh]
        executables.append(
            backend.relocate(executables[0], fragment, mesh) or backend.compile(fragment, mesh)
        )
    return executables
