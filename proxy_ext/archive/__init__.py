"""What ended long ago, in compressed files: written once, self-describing, never in the way.

- `records.py`: one session as one line of JSON.
- `files.py`: lines in a file, each compressed by itself, so that damage costs one of them.
- `sweep.py`: moves sessions from the journal into files, and takes one out again.

A file is whole and on disk before the journal lets go of what is in it. `any-agent export` reads
files and journals alike, and imports no more than it needs: hence nothing is imported here.
"""
