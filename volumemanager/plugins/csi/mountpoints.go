package csi

import (
	"sync"

	"github.com/trivet-csi/trivet/linux/mount"
)

// tableRead is one reading of the mount table.
type tableRead struct {
	once   sync.Once
	points map[string]bool
	err    error
}

// mountTable reads the mount table. All calls that wait for the next reading share it, because one
// reading for each of hundreds of volumes would take most of the time.
type mountTable struct {
	// reading is held during a reading.
	reading sync.Mutex
	mu      sync.Mutex
	next    *tableRead
}

// mountpoints returns the mount points of a reading that started after the call. Callers
// share the result and must not change it.
func (s *mountTable) mountpoints() (map[string]bool, error) {
	s.mu.Lock()
	if s.next == nil {
		s.next = &tableRead{}
	}
	r := s.next
	s.mu.Unlock()
	r.once.Do(func() {
		s.reading.Lock()
		defer s.reading.Unlock()
		s.mu.Lock()
		s.next = nil // later calls need a later reading
		s.mu.Unlock()
		r.points = map[string]bool{}
		_, r.err = mount.Table(func(e *mount.Entry) bool {
			r.points[e.Mountpoint] = true
			return false
		})
	})
	return r.points, r.err
}
