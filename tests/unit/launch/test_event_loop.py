"""Tasks that the work of an event loop leaves."""

from __future__ import annotations

import asyncio
import gc

import pytest

from disagg.instances import ServedInstance
from launch.event_loop import run_alone
from mpillm.cores.openai_client.client_thread import ClientThread
from mpillm.endpoint.leader.workers import Worker, new_session, wait_ready


def _no_task_was_destroyed(caplog: pytest.LogCaptureFixture) -> bool:
    gc.collect()
    return not any("destroyed" in record.getMessage() for record in caplog.records)


def test_a_leader_that_is_ended_while_it_waits_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    """Its health checks were tasks that asyncio named one by one as destroyed."""

    async def work() -> int:
        async with new_session() as session:
            workers = [
                Worker(ServedInstance(i, "context", "context_servers", "127.0.0.1:9", range(i, i + 1)))
                for i in range(3)
            ]
            waiting = asyncio.ensure_future(wait_ready(session, workers, 3600.0, lambda text: None))
            await asyncio.sleep(0.1)
            waiting.cancel()
            return len(asyncio.all_tasks())

    assert run_alone(work()) > 3
    assert _no_task_was_destroyed(caplog)


@pytest.mark.long
def test_a_thread_of_clients_that_is_stopped_leaves_no_task(caplog: pytest.LogCaptureFixture) -> None:
    ended = []

    async def waits() -> None:
        try:
            await asyncio.sleep(3600.0)
        finally:
            ended.append(True)

    async def begin() -> None:
        tasks.append(asyncio.ensure_future(waits()))
        await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []
    thread = ClientThread("clients")
    thread.run(begin(), 60.0)
    thread.stop()
    assert ended == [True] and tasks.pop().cancelled() and thread.error is None
    assert _no_task_was_destroyed(caplog)
