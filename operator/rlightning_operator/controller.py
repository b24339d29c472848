"""The loop: something about a job changed → look at all of it → decide (:mod:`.reconcile`) → write → wait.

Level-triggered: an event only says that a job is worth a look, and each look starts from everything that is known. So
events may come late, twice or never (a full pass over all jobs is made every ten minutes), and the process may be
killed at any time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from rlightning_operator import metrics
from rlightning_operator.kube import kinds
from rlightning_operator.kube.cache import Cache, Key, job_key, version
from rlightning_operator.kube.client import ApiError, Client, Unreachable
from rlightning_operator.kube.events import Recorder
from rlightning_operator.kube.executor import Executor, Gone, Refused, Stale
from rlightning_operator.kube.kinds import Kind, Object
from rlightning_operator.kube.optional import OptionalWatch
from rlightning_operator.kube.queue import Closed, WorkQueue
from rlightning_operator.kube.relist import Relister
from rlightning_operator.reconcile.snapshot import KubeRay, Note, OperatorConfig, Plan, Snapshot

log = logging.getLogger(__name__)

COALESCE_SECONDS = 0.05
RESYNC_SECONDS = 600.0
PASS_SECONDS = 150.0  # a pass makes at most a dozen requests, each with a deadline of 30 s of its own
QUICK_PASSES, LONGEST_SETTLE_SECONDS = 10, 30.0
STOP_SECONDS = 5.0
STUCK_SECONDS = 180.0
STUBBORN_FAILURES = 4  # the first four tries take about 4 s
SAME_WORDS_SECONDS = 60.0
OVERDUE_SECONDS = 60.0


WATCHED: tuple[Kind, ...] = (
    kinds.RLJOB,
    kinds.POLICY_GROUP,
    kinds.POD,
    kinds.JOB,
    kinds.CLAIM,
    kinds.SERVICE_ACCOUNT,
    kinds.ROLE,
    kinds.ROLE_BINDING,
    kinds.NETWORK_POLICY,  # those of running jobs go when an administrator turns them off
)
"""What exists on every cluster, and must be readable: kopf watches these."""


class Controller:
    """Looks after all RLJobs of the namespaces that it watches.

    Args:
        plan: :func:`rlightning_operator.reconcile.plan.reconcile`.
        namespaces: None for all.
        refresh: asked now and then for the configuration as it should be by now.
        failed: called once if a task that should run forever ends; the process should then end too.
    """

    def __init__(
        self,
        client: Client,
        config: OperatorConfig,
        plan: Callable[[Snapshot], Plan],
        *,
        namespaces: tuple[str, ...] | None = None,
        workers: int = 4,
        refresh: Callable[[OperatorConfig], Awaitable[OperatorConfig]] | None = None,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self._client = client
        self._config = config
        self._plan = plan
        self._workers = workers
        self._refresh = refresh
        self._failed = failed
        self.cache = Cache()
        self.queue: WorkQueue[Key] = WorkQueue()
        self._executor = Executor(client, self.cache)
        self._recorder = Recorder(client)
        self.relister = Relister(client, self.cache, WATCHED, namespaces, self._changed)
        self._optional = [
            OptionalWatch(client, self.cache, kinds.RAY_CLUSTER, namespace, self._changed, self._kuberay_is)
            for namespace in (namespaces or (None,))
        ]
        self._optional.append(OptionalWatch(client, self.cache, kinds.NODE, None, self._changed, self._nodes_are))
        self._settling: dict[Key, int] = {}
        self._refused: dict[Key, tuple[Refused, float]] = {}  # since when these words are said
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._last_pass = time.monotonic()
        self.ready = False

    # ---------------------------------------------------------------------------------------------- start, stop, health

    async def start(self) -> None:
        """Start; the jobs are first looked at when everything was listed once."""
        for watch in self._optional:
            self._run(watch.run(), "watch")
        self._run(self._recorder.run(), "recorder")
        self._run(self._begin(), "begin", forever=False)

    async def _begin(self) -> None:
        for watch in self._optional:
            await watch.looked.wait()
        while True:
            try:
                await self.relister.relist()
                break
            except (ApiError, Unreachable) as error:
                log.warning("the first listing failed, and is tried again: %s", error)
                await asyncio.sleep(random.uniform(1.0, 3.0))
        self.ready = True
        log.info("%d jobs found", len(self.cache.jobs()))
        self._run(self.relister.run(), "relister")
        self._run(self._resync(), "resync")
        for number in range(self._workers):
            self._run(self._work(), f"worker {number}")

    async def stop(self) -> None:
        """Let the passes under way come to their end, if that is soon, and end everything."""
        self._stopping = True
        self.queue.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_SECONDS):
                while not self.queue.idle:
                    await asyncio.sleep(0.02)
        await self._recorder.drain(1.0)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def trouble(self) -> list[str]:
        """Why the process should be restarted: something here does not move any more. A slow API server is none."""
        now = time.monotonic()
        trouble = []
        if self.queue.longest_work > STUCK_SECONDS:
            trouble.append(f"a pass over a job has been under way for {self.queue.longest_work:.0f} s")
        if self.ready and min(self.queue.overdue, now - self._last_pass) > OVERDUE_SECONDS:
            trouble.append(f"a job has been waiting for {self.queue.overdue:.0f} s")
        trouble += [f"the watch of {plural} brings nothing" for plural in self.relister.late]
        silent = [watch for watch in self._optional if now - watch.last_sign > STUCK_SECONDS]
        if silent:
            trouble.append(f"{len(silent)} watches have made no step for {STUCK_SECONDS:.0f} s")
        return trouble

    def states(self) -> list[str]:
        """status.state of every job."""
        return [job.get("status", {}).get("state", "None") for job in self.cache.all(kinds.RLJOB)]

    def _run(self, work: Coroutine[Any, Any, None], name: str, forever: bool = True) -> None:
        def ended(task: asyncio.Task[None]) -> None:
            if task.cancelled() or self._stopping:
                return
            error = task.exception()
            if error is not None or forever:
                self._failed(error or RuntimeError(f"the task {name} has ended"))

        task = asyncio.get_running_loop().create_task(work, name=name)
        task.add_done_callback(ended)
        self._tasks.append(task)

    # ----------------------------------------------------------------------------------------------------- what is seen

    def observe(self, kind: Kind, change: str | None, obj: Object) -> None:
        """An event of a watch; ``change`` is None where the object comes from a listing."""
        metrics.OBSERVED.labels(kind.name).inc()
        self.relister.delivered(kind, obj)
        if change is None and self.ready:
            self.relister.suspect()
        if change == "DELETED":
            self.cache.remove(kind, obj["metadata"]["uid"], version(obj))
            self._changed(kind, obj)
        elif self.cache.put(kind, obj):
            self._changed(kind, obj)

    def _changed(self, kind: Kind, obj: Object) -> None:
        """The jobs that an object concerns are worth a look."""
        if kind is kinds.NODE:
            for key in self.cache.unfinished():
                self.queue.add(key, 1.0)
        elif kind is kinds.CLAIM:
            for key in self.cache.users(obj):
                self.queue.add(key, COALESCE_SECONDS)
        else:
            owner = job_key(kind, obj)
            if owner is not None:
                self._settling.pop(owner, None)
                self.queue.add(owner, COALESCE_SECONDS)

    def _kuberay_is(self, namespace: str | None, refusal: ApiError | None) -> None:
        # That it is not served (404) needs no words.
        words = refusal.message if refusal is not None and refusal.code != 404 else ""
        self.cache.kuberay[namespace] = KubeRay(installed=refusal is None, message=words)
        self._all(COALESCE_SECONDS)

    def _nodes_are(self, _: str | None, refusal: ApiError | None) -> None:
        self.cache.nodes_readable = refusal is None
        self._all(COALESCE_SECONDS)

    def _all(self, within: float) -> None:
        for key in self.cache.jobs():
            self.queue.add(key, random.uniform(0.0, within))

    async def _resync(self) -> None:
        self._all(0.0)
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.9, 1.1))
            if self._refresh is not None:
                try:
                    self._config = await self._refresh(self._config)
                except (ApiError, Unreachable) as error:
                    log.warning("the configuration was not brought up to date: %s", error)
            self._all(30.0)

    # ---------------------------------------------------------------------------------------------------- what is done

    async def _work(self) -> None:
        with contextlib.suppress(Closed):
            while True:
                key = await self.queue.get()
                start = time.perf_counter()
                try:
                    async with asyncio.timeout(PASS_SECONDS):
                        result = await self._pass(key)
                except TimeoutError:
                    slow = Unreachable(f"the API server took more than {PASS_SECONDS:g} s for one pass over the job")
                    result = self._failure(key, slow)
                except Exception as error:
                    result = self._failure(key, error)
                finally:
                    self.queue.done(key)
                    self._last_pass = time.monotonic()
                metrics.RECONCILES.labels(result).inc()
                metrics.RECONCILE_SECONDS.observe(time.perf_counter() - start)

    async def _pass(self, key: Key) -> str:
        """Look at one job, and write what it needs; returns what came of it."""
        snapshot = self.cache.snapshot(key, self._config, datetime.now(UTC))
        if snapshot is None:
            self._forget(key)
            return "gone"
        refused, _ = self._refused.get(key, (None, 0.0))
        told = dataclasses.replace(
            snapshot,
            refused=str(refused) if refused is not None else None,
            answers_since=self._client.answers_since,
        )
        plan = self._plan(told)

        def stored() -> None:
            # Now: should an action fail, the next pass will not take this decision again, and so not say it.
            for note in plan.notes:
                self._recorder.record(snapshot.job, note)

        try:
            if _ends_attempt(snapshot.job, plan.status) and await self._executor.news_of_driver(key, snapshot):
                # The watches come one after the other: the submitter's end, say, before the driver's outcome.
                self._settle(key)
                return "conflict"
            if plan.requeue_after is not None:  # before the writes: a deadline does not wait for one that is refused
                self.queue.add(key, max(plan.requeue_after, COALESCE_SECONDS))
            writes = await self._executor.carry_out(key, snapshot.job, plan, stored)
        except Stale as stale:
            log.debug("%s; looking again", stale, extra={"job": "/".join(key)})
            self._settle(key)
            return "conflict"
        except Gone as gone:
            log.debug("%s", gone, extra={"job": "/".join(key)})
            self._forget(key)
            return "gone"
        self.queue.forgive(key)
        if self._refused.pop(key, None) is not None or writes:
            self._settle(key)  # our own writes may make more of the plan possible; a pass without any ends it
            return "wrote"
        self._settling.pop(key, None)
        return "unchanged"

    def _settle(self, key: Key) -> None:
        """Look again at once; less and less soon if that does not come to an end, which it should."""
        passes = self._settling[key] = self._settling.get(key, 0) + 1
        if passes == QUICK_PASSES:
            log.warning("%d passes in a row wrote something, and nothing settles", passes, extra={"job": "/".join(key)})
        slow = min(0.1 * 2.0 ** min(passes - QUICK_PASSES, 20), LONGEST_SETTLE_SECONDS)
        self.queue.add(key, COALESCE_SECONDS if passes < QUICK_PASSES else slow)

    def _failure(self, key: Key, error: Exception) -> str:
        """Say what went wrong, where the user sees it too, and try again later."""
        metrics.ERRORS.labels("reconcile").inc()
        failures, delay = self.queue.retry(key)
        extra = {"job": "/".join(key), "fields": {"failures": failures, "retry_seconds": round(delay, 1)}}
        expected = isinstance(error, ApiError | Unreachable | Refused)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        if isinstance(error, Refused):
            self._remember(key, error, failures)
        if isinstance(error, Unreachable) or (isinstance(error, ApiError | Refused) and error.transient):
            log.warning("a pass failed: %s", text, extra=extra)
            return "error"
        log.error("a pass failed: %s", text, extra=extra, exc_info=None if expected else error)
        job = self.cache.job(key)
        if job is not None:
            message = f"{text}; it is tried again" if expected else f"a bug in the operator: {text}; it is tried again"
            self._recorder.record(job, Note("Warning", "ReconcileError", message))
        return "error"

    def _remember(self, key: Key, refused: Refused, failures: int) -> None:
        """For the job's conditions, unless it may pass by itself.

        The words stay for a while as long as the write is the same: where they differ each time (a webhook's request
        number, a quota's count) each would be another write of the status.
        """
        if failures < (STUBBORN_FAILURES if refused.transient else 2):
            return
        said, since = self._refused.get(key, (None, 0.0))
        now = time.monotonic()
        if said is None or said.write != refused.write or now - since > SAME_WORDS_SECONDS:
            self._refused[key] = (refused, now)

    def _forget(self, key: Key) -> None:
        self.queue.forgive(key)
        self._settling.pop(key, None)
        self._refused.pop(key, None)


def _ends_attempt(job: Object, status: Object) -> bool:
    """Whether the status to be stored gives up the attempt that runs."""
    before = job.get("status", {})
    if before.get("attempt") is None:
        return False
    return status.get("attempt", 0) > before["attempt"] or (
        "completionTime" in status and "completionTime" not in before
    )
