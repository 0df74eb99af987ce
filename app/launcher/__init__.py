"""Brings up a whole cluster on one machine and keeps it up: ``baton up``.

::

    up.py            ports, folders, the lock and signals around one launch
    launch.py        prepare, start, wait until ready, supervise, stop
    checks.py        what must hold before anything is started
    prepare.py       fetches and converts the model, in a process of its own
    ledger_child.py  runs the embedded Valkey, in a process of its own
    plan.py          which children there are, with their command lines and environments
    supervisor.py    keeps children alive; stops them in order
    child.py         one child: spawned, reaped, killed with its whole process group
    backoff.py       how long to wait before a restart
    wakeup.py        signals and time as one thing to wait for
    model_facts.py   what a model costs
    reporter.py      tells the ledger which incarnation has ended
    readiness.py     what is still missing until requests can be served
    lock.py          one ``baton up`` per BATON_HOME
    status.py        ``baton status``
    drain.py         ``baton drain``
    rolling.py       restarts one process after the other, while they serve
    progress.py      ``baton restart``, and how it hears of that
"""
