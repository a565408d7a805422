"""Weight transports inside one process and over a disk, and the checks that every transport makes."""
