"""Where the suites say on which machines they run: here they run where they are started."""


def register_cuda_ci(**_where: object) -> None:
    """Nothing to do."""


def register_amd_ci(**_where: object) -> None:
    """Nothing to do."""
