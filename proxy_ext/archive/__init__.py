"""Sessions that ended long ago, in compressed files that are written once and describe themselves.

- `records.py`: one session as one line of JSON.
- `files.py`: lines in a file, each compressed by itself, so that damage costs one of them.
- `archiver.py`: moves sessions from the journal into files, and removes single ones from files, and
  the oldest files beyond a limit.

A file is complete and on disk before the journal drops its sessions. `any-agent export` reads files
and journals alike, and needs a quick start, so nothing is imported here.
"""
