package shared

import (
	"errors"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// reaperFile is locked by the process that empties the trash.
const reaperFile = ".trivet/reaper"

// trashLock prevents other processes from emptying the trash. It is held while users is not zero.
type trashLock struct {
	mu    sync.Mutex
	users int
	file  *os.File
}

// HoldTrash gives this process the right to empty the trash until release is called; release is nil if
// another process has that right. On a server without locks two processes may have it, which does no
// harm.
func (e *Export) HoldTrash() (release func(), err error) {
	l := &e.trash
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users == 0 {
		if l.file, err = e.Files.Open(e.Dir, reaperFile, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			return nil, e.foreign(reaperFile, err)
		}
		err = unix.Flock(int(l.file.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err != nil && !NoLocks(err) {
			_ = l.file.Close()
			if errors.Is(err, unix.EWOULDBLOCK) {
				err = nil
			}
			return nil, err
		}
	}
	l.users++
	return e.releaseTrash, nil
}

// releaseTrash ends one use of the trash lock. The last user releases the lock by closing the file.
func (e *Export) releaseTrash() {
	l := &e.trash
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.users--; l.users == 0 {
		_ = l.file.Close()
	}
}
