"""A compact form of a set that contains almost all numbers below a bound."""


class IdSet:
    """A set of integers: all below a bound, and single ones above it.

    It records which batches have been applied, in any order, without storing every number. At first
    it contains all numbers below `first`.
    """

    def __init__(self, first: int = 0) -> None:
        self.complete = first
        """All numbers below this are members."""
        self.beyond: set[int] = set()
        """The other members."""

    def enter(self, number: int) -> bool:
        """Adds a number. Returns False if it was a member already."""
        if number in self:
            return False
        self.beyond.add(number)
        self._raise_bound()
        return True

    def _raise_bound(self) -> None:
        while self.complete in self.beyond:
            self.beyond.remove(self.complete)
            self.complete += 1

    def close(self, floor: int) -> None:
        """Adds all numbers below `floor`."""
        if floor > self.complete:
            self.complete = floor
            self.beyond = {number for number in self.beyond if number >= floor}
            self._raise_bound()

    def __contains__(self, number: int) -> bool:
        return number < self.complete or number in self.beyond

    @property
    def count(self) -> int:
        """Number of members that are not negative."""
        return self.complete + len(self.beyond)
