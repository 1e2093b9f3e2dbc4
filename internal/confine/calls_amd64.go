package confine

import "golang.org/x/sys/unix"

// refusedHere contains the refused calls that only this architecture has: access to I/O ports, segments of 16 bits, and a
// call that the kernel does not have any more.
var refusedHere = []uint32{unix.SYS_IOPL, unix.SYS_IOPERM, unix.SYS_MODIFY_LDT, unix.SYS_USELIB}
