"""Numbers that are each counted once, in any order: batches that have been added, say."""


class IdSet:
    """All whole numbers below `first`, and those that are entered."""

    def __init__(self, first: int = 0) -> None:
        self.complete = first
        """All numbers below this are in it."""
        self._beyond: set[int] = set()

    def enter(self, number: int) -> bool:
        """Enter a number; False where it is in it already."""
        if number in self:
            return False
        self._beyond.add(number)
        self._go_on()
        return True

    def _go_on(self) -> None:
        while self.complete in self._beyond:
            self._beyond.remove(self.complete)
            self.complete += 1

    def close(self, floor: int) -> None:
        """Count all numbers below `floor` as entered: none of them comes any more."""
        if floor > self.complete:
            self.complete = floor
            self._beyond = {number for number in self._beyond if number >= floor}
            self._go_on()

    def __contains__(self, number: int) -> bool:
        return number < self.complete or number in self._beyond

    @property
    def count(self) -> int:
        """How many numbers from 0 on are in it."""
        return self.complete + len(self._beyond)
