"""Owns the scheduler's limits: each with its unit in its name and a reason beside it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a deployment may set. All times in seconds."""

    #: How long an idle instance is kept, counted from the end of its last request, when its model says nothing else.
    #: It only bounds how long memory is held for nobody: an idle instance gives way to a waiting model at once.
    keep_alive_s: float = 60.0
    #: How long a model waits for a slot before a busy instance is drained for it: long enough not to swap back and
    #: forth for every request, short beside what a client accepts as a cold start.
    fair_wait_s: float = 2.0
    #: A load without a byte of progress for so long has stalled. Readers retry a bad chunk well within this.
    load_stall_s: float = 90.0
    #: A migration in which nothing moved for so long has stalled: rounds and handovers take much less than a second,
    #: but for the first round, which has three times its estimate if that is more.
    migration_stall_s: float = 10.0
    #: Three heartbeats of one second missed, and half of one for jitter.
    lost_after_s: float = 3.5
    #: Repeat a command that no heartbeat has confirmed. Just under a heartbeat, so that every one can trigger it.
    repeat_s: float = 0.9
    #: A waiter whose router has not repeated it for so long is gone; routers repeat every second.
    waiter_silent_s: float = 10.0
    #: Requests that may wait for one model, and for all: each costs its router an open connection and us 200 bytes.
    waiting_per_model_max: int = 1_000
    waiting_max: int = 10_000
    #: Models and open imports. A catalogue is kept in memory, with each model's config.
    models_max: int = 10_000
    imports_max: int = 64
    #: How servers are chosen; see policies.py.
    policy: str = "migration"


#: Time in which a request that was given a route reaches its worker; until then its instance is not idle.
PROMISE_S = 2.0
#: After a refused unload the instance counts as busy for so long: the news of its request is on its way to us.
REFUSED_HOLD_S = 0.5
#: A worker may be heard before the agent whose load made it ready; the agent's report of stages is waited for so long.
LOAD_REPORT_WAIT_S = 0.1
#: A worker that let go of a loading instance was told so by the agent, whose own report names the cause: wait for it.
DETACHED_WAIT_S = 1.0
#: Loads tried for the waiting requests of a model: one retry, on another server where there is one.
LOAD_TRIES_MAX = 2
#: A lost worker or server says little about the model; more tries, but not for ever: a model may kill its workers.
LOST_TRIES_MAX = 4
#: A step that comes so late means that we were not listening (the store was away): nobody is lost for that.
PAUSE_S = 1.0
#: Models for which something to drain is looked for in one tick: with 100 servers each takes about a millisecond.
DRAINS_TRIED_MAX = 16
#: A model that nobody waits for, that could not be placed, is tried again for its minimum only after so long.
DEFERRED_S = 2.0
#: Models that wait, and are tried in one step: the next step goes on from there.
TRIES_PER_STEP_MAX = 64
#: Decisions that are kept with all that they were made from: some 50 kB each with 100 servers.
DECISIONS_KEPT_MAX = 200
#: An instance whose migration was given up is not moved again before so long: what went wrong may well do so again.
MOVE_AGAIN_S = 10.0
#: Migrations that are told of after their end.
MIGRATIONS_KEPT_MAX = 50
#: A model that nobody waits for, whose load failed for good, is loaded again for its minimum only after so long.
BLOCKED_S = 15.0
#: A model that is loaded again within so many of its loading times since it had to go for another model shows thrash.
THRASH_LOADS_MAX = 20.0
#: What was learned of resumes is made durable with every so many observations.
RESUME_SAVED_EVERY = 8
#: Lost servers are remembered for so long: their room counts when a model seems too large for the cluster.
FORGET_SERVER_S = 300.0
#: Import jobs kept after their end, for those who ask how it went.
ENDED_JOBS_MAX = 100
