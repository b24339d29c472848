"""Members in this process."""

from __future__ import annotations

import threading
from typing import Any

from rlightning.policy.gradients import Baton
from rlightning.runtime.member import Done, Future, Shared, explained
from rlightning.runtime.rng import RngState, Stream


class LocalMember:
    """A policy object in this process, isolated from the others by random state only.

    Calls run at once in the caller's thread. Members that share a :class:`~rlightning.policy.gradients.Baton` run
    their training step in a thread each, one at a time, because they have to meet in the middle of it.
    """

    def __init__(self, name: str, role: str, policy: Any, seed: int, stream: Stream, index: int = 0) -> None:
        self.name, self.role, self.node, self.pod, self.policy = name, role, "local", "", policy
        self.rng = RngState.seeded(seed, stream, index)
        self.baton: tuple[Baton, int] | None = None
        policy.member_name = name

    def call(self, method: str, *args: Any, **kwargs: Any) -> Future[Any]:
        args = tuple(a.value if isinstance(a, Shared) else a for a in args)
        if self.baton is not None and method == "train_iteration":
            return _Turn(self, *self.baton, method, args, kwargs)
        try:
            with self.rng.swapped():
                return Done(getattr(self.policy, method)(*args, **kwargs))
        except Exception as error:
            return Done(error=explained(self.name, method, error))


class _Turn:
    """The future of a call that takes turns with others."""

    def __init__(
        self, member: LocalMember, baton: Baton, rank: int, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._value: Any = None
        self._error: BaseException | None = None

        def run() -> None:
            error: BaseException | None = None
            try:
                baton.wait_for_turn(rank)
                member.rng.restore()
                self._value = getattr(member.policy, method)(*args, **kwargs)
            except Exception as caught:
                error = caught
                self._error = explained(member.name, method, caught)
            finally:
                # Still this rank's turn: nobody else touches the global generators until finish() hands over.
                if error is None:
                    member.rng = RngState.capture()
                baton.finish(rank, error)

        self._thread = threading.Thread(target=run, name=f"{member.name}.{method}", daemon=True)
        self._thread.start()

    def result(self, timeout: float | None = None) -> Any:
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return self._value

    def done(self) -> bool:
        return not self._thread.is_alive()
