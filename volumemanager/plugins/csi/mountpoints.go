package csi

import (
	"sync"

	"github.com/trivet-csi/trivet/linux/mount"
)

// look is one reading of the mount table.
type look struct {
	once   sync.Once
	points map[string]bool
	err    error
}

// looks has the next one, for all who ask before it begins: with hundreds of volumes that
// come at once, reading the table for each would take longer than all else.
type looks struct {
	// reading is held by the one that has begun.
	reading sync.Mutex
	mu      sync.Mutex
	next    *look
}

// mountpoints are those in the mount table, as it is or was after the call. They are
// shared, and never changed.
func (s *looks) mountpoints() (map[string]bool, error) {
	s.mu.Lock()
	if s.next == nil {
		s.next = &look{}
	}
	l := s.next
	s.mu.Unlock()
	l.once.Do(func() { s.read(l) })
	return l.points, l.err
}

func (s *looks) read(l *look) {
	s.reading.Lock()
	defer s.reading.Unlock()
	s.mu.Lock()
	s.next = nil // who asks from here on has another
	s.mu.Unlock()
	l.points = map[string]bool{}
	_, l.err = mount.Table(func(e *mount.Entry) bool {
		l.points[e.Mountpoint] = true
		return false
	})
}
