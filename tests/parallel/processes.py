"""Processes of a test that work together: see test_parallel.py and test_model.py."""

import multiprocessing


def run(work, count, store, start_method):
    """Start `count` processes of `work(rank, store, report)`; each reports (rank, problem or "").

    Args:
        work: A function of a module.
        count: Processes.
        store: Path of the file by which they find each other.
        start_method: As `multiprocessing` names it.
    """
    context = multiprocessing.get_context(start_method)
    report = context.Queue()
    processes = [
        context.Process(target=work, args=(r, store, report), daemon=True) for r in range(count)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            rank, problem = report.get(timeout=120)
            assert not problem, f"rank {rank}:\n{problem}"
    finally:
        for process in processes:
            process.join(timeout=5)
            process.kill()
