"""What a run of the engine records: plain tuples, so that they are cheap to make, to send between processes and to write down.

The driver only says what happened; whether it may happen is for `judge`. The first element of an event names it:

    raised      (side, hook, error, about)              a hook raised, or its process ended: the server is dead; `about`: keys of
                                                        items that may have to do with it
    returned    (side, hook, problem)                   a hook returned what the engine cannot use
    lookup      (request, key, answer)                  has_cache_item
    deferred    (request, running, computed, pending, unencodable)
                                                        ensure_cache_available said no; `pending`: keys not computed yet,
                                                        `unencodable`: those of them that came without media
    promised    (request, key, again)                   looked up with yes and allocated; `again`: after a preemption
    metadata    (requirement, problem)                  what is wrong with the metadata of this step
    loading     (keys)                                  start_load_caches is about to run, for these promises
    loaded      (rank, key, digest, shape, dtype, device, asked)
                                                        start_load_caches put it there; `asked`: allocated in this step
    missing     (rank, key)                             promised, and not there when start_load_caches returned
    lost        (rank, key)                             not there when the rows are merged: the server is dead
    encoded     (rank, key)
    unencodable (request, key)                          the engine would encode an item without media: the server is dead
    used        (rank, key, digest)                     the rows as they are merged into the prompt
    saved       (rank, key, published)                  save_caches returned; `published`: what else is in the store than before
    named       (requests)                              take_unavailable_requests
    finished    (request, status, problem)              request_finished; `problem`: (requirement, text) or None
    evicted     (key, reset)                            left the workers' caches
    store       (requirement, what)                     the store, or what lies beside it, changed when it must not
    damaged     (key, how, window)                      the harness damaged the object, `window`: within a step
    built       (scheduled)                             build_connector_meta returned; whether the step schedules anything
    went-on     (request)                               a running request whose items are all computed was let through
    merged      (reported)                              the ranks' reports were aggregated; whether the connector reported anything
    shutdown    (side)                                  shutdown returned

vLLM's own Scheduler, where it is driven, leaves these as well (`real_core`, `schedule_judge`); an index is that of an item in the
request:

    queued      (request, tokens, items)                `items`: (key, offset, mask, whether it came without payload)
    asked       (request, computed, answer)             ensure_cache_available
    room        (request, index, budget, pending, answer, evicted)
                                                        can_allocate, with the keys that had to go
    unasked     (keys)                                  had left the cache before the pass began
    took        (request, index)                        allocate
    told        (request, index)                        update_state_after_alloc
    consumed    (request, index)                        update_state_after_free
    pass        (facts)                                 schedule returned: see `RealCore.schedule`
    settled     (pass, ends, held, blocks)              its results were taken in; where its requests stand, who holds which key,
                                                        and blocks of the KV cache that are taken
    cleared     (keys)                                  the harness evicted them; None: it reset the encoder cache
    broke       (where, error)                          vLLM's Scheduler raised: the server is dead

What the harness did itself stands among them, so that the events of a plan are all that a judge needs:

    operation   (number)                                of the plan; what follows belongs to it
    booted      ()                                      both sides of the server were made
    gone        (keeps)                                 the server ended; whether the store outlives it
    arrived     (request, media, hostile)               `media`: key -> whether the request has its media
    fault       (fault)                                 the store has this fault from now on; empty: it is mended
    absent      (keys)                                  of the store's fault, just before it is mended: the probe finds no whole
                                                        object of these
    made-to-name (request)                              the connector will name it as unavailable
    watch       (begins)                                the store is watched for changes, or no more
    swept       ()                                      what lies outside the store was looked at
    stuck       (request, seconds)                      not served and not given up for so long, by the plan's clock
    idle        (seconds, pending)                      nothing is left to do; whether the connector says otherwise for so long
"""

from __future__ import annotations

from typing import Any

Event = tuple[Any, ...]


class EngineDied(Exception):
    """The engine, or a worker, would have ended here. The event that says why has been recorded."""


class HarnessBrokeError(Exception):
    """A process of a plan broke, or was killed, for a reason that is not the connector's."""


def describe(error: BaseException) -> str:
    """An exception in one line, with the innermost frame: type, message, place."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename.rsplit('/', 1)[-1]}:{frames[-1].lineno} {frames[-1].name})" if frames else ""
    text = ascii(str(error))[1:-1]
    return f"{type(error).__name__}: {text[:200]}{'...' if len(text) > 200 else ''}{place}"
