"""Processes of the `holdfast` command that start without importing: forks of a process that has imported it all.

A `holdfast serve` spends four seconds of processor time on imports, most of it on torch, in two processes. Tests
start hundreds of them. `commands.Command` is a `subprocess.Popen` whose child is a fork of one preloaded process
(`nursery`), and the engine process of a server is a fork of the server (`engine`). They are processes like others:
children of the test and of the server, with a command line, standard streams, an environment and a working
directory of their own, and they end as an interpreter ends. Commands that a fork cannot stand for are executed: those
with another interpreter environment, and all of them with `HOLDFAST_TESTS_EXECUTE=1`.
"""
