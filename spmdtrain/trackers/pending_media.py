"""Media that are being copied to the host, shared by the threads of several trackers."""

import threading
from collections.abc import Callable

from spmdtrain.errors import foreign
from spmdtrain.trackers.media import Media


class PendingMedia:
    """Media whose arrays are fetched once, in the thread that needs them first.

    The media have been checked; `what` names them in messages.
    """

    def __init__(self, media: Media, what: str, log: Callable[[str], None]) -> None:
        self._media: Media | None = media.detach()
        self._what, self._log = what, log
        self._lock, self._is_done = threading.Lock(), False

    def on_host(self) -> Media | None:
        """Returns the media as trackers receive them; None if they could not be made.

        A failure, for example of the user's `decode`, is printed once; it is not a failure of the
        tracker.
        """
        with self._lock:
            if not self._is_done and self._media is not None:
                self._is_done = True
                try:
                    self._media = self._media.on_host()
                except Exception as error:
                    self._media = None
                    text = foreign(" ".join(str(error).split()), 300)
                    self._log(f"{self._what} is not logged: {type(error).__name__}: {text}")
            return self._media
