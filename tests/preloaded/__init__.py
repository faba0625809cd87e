"""Processes of the `holdfast` command that need not import it: forks of a process that has done so.

A server spends four seconds of processor time on imports, most of it on torch, in two processes, and tests
start hundreds of them. `commands.Command` is a `subprocess.Popen` whose child is a fork of one preloaded
process (`nursery`); the engine process of a server is a fork of the server (`engine`), and the servers and
engines that a benchmark starts are forks of it (`benchmarks`). They are processes
like any other: children of the test and of the server, with a command line, standard streams, environment
and working directory of their own, and `kill -9` ends them. A command is executed in a new interpreter
where a fork cannot stand for it (variables that an interpreter reads at its start differ) and where a test
asks for it. With `HOLDFAST_TESTS_EXECUTE=1`, as in `make soak`, all are.
"""
