package csi

import (
	"sync"

	"github.com/trivet-csi/trivet/mount"
)

// look is one reading of the mount table.
type look struct {
	once   sync.Once
	points map[string]bool
	err    error
}

// looks has the next one, for all who ask before it begins: with hundreds of volumes that
// come at once, reading the table for each would take longer than all else.
var looks struct {
	// reading is held by the one that has begun.
	reading sync.Mutex
	mu      sync.Mutex
	next    *look
}

// mountpoints are those in the mount table, as it is or was after the call. They are
// shared, and never changed.
func mountpoints() (map[string]bool, error) {
	looks.mu.Lock()
	if looks.next == nil {
		looks.next = &look{}
	}
	l := looks.next
	looks.mu.Unlock()
	l.once.Do(l.read)
	return l.points, l.err
}

func (l *look) read() {
	looks.reading.Lock()
	defer looks.reading.Unlock()
	looks.mu.Lock()
	looks.next = nil // who asks from here on has another
	looks.mu.Unlock()
	l.points = map[string]bool{}
	_, l.err = mount.Table(func(e *mount.Entry) bool {
		l.points[e.Mountpoint] = true
		return false
	})
}
