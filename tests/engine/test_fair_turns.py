import threading
import time

import pytest

from keepmask.engine.fair_turns import Turns


def test_turns_come_in_the_order_they_were_asked_for():
    turns, order = Turns(), []

    def take(name):
        with turns:
            order.append(name)

    threads = []
    with turns:
        for name in range(8):
            threads.append(threading.Thread(target=take, args=(name,)))
            threads[-1].start()
            while len(turns._waiting) <= name:
                time.sleep(0.001)
    for thread in threads:
        thread.join()
    assert order == list(range(8))
    with turns:
        pass


def test_a_thread_in_a_loop_lets_others_have_their_turn():
    turns, done = Turns(), threading.Event()

    def loop():
        while not done.is_set():
            with turns:
                time.sleep(0.001)

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(20):
        with turns:
            pass
    done.set()
    thread.join()


def test_an_exception_hands_the_turn_on():
    turns = Turns()
    with pytest.raises(KeyError), turns:
        raise KeyError
    with turns:
        pass
