"""One job of many processes: initialization, agreement, progress and failures."""
