package pool

import (
	"errors"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// Inline finds an inline volume of a backend by the kubelet's ID, in whatever pool of
// this node. It reads the disk of no pool that is known to lack the volume: that disk may
// not answer. ErrNotFound; ErrUnavailable while a pool that may have it is not open;
// ErrDamaged with the volume's ID alone.
func (s *Set) Inline(backend, id string) (volume.Volume, error) {
	var damaged volume.Volume
	missing := s.inlineClosed()
	for _, p := range s.local() {
		if p.ledger.Lacks(volumeDir(id)) {
			continue
		}
		v, err := p.inline(backend, id)
		if err == nil {
			return v, nil
		}
		if !errors.Is(err, volume.ErrNotFound) {
			damaged, missing = v, err
		}
	}
	if missing == nil {
		missing = volume.Errorf(volume.ErrNotFound, "inline volume %q is not on this node", id)
	}
	return damaged, missing
}

// Inlines returns the IDs of all inline volumes of a backend in the pools of this node.
// ErrUnavailable beside them while a pool that may contain more is not open.
func (s *Set) Inlines(backend string) ([]string, error) {
	closed := s.inlineClosed()
	var all []string
	for _, p := range s.local() {
		all = append(all, p.inlines(backend)...)
	}
	return all, closed
}

// local are the pools of this node that are open.
func (s *Set) local() []*Pool {
	var open []*Pool
	if s.shared != nil {
		return nil
	}
	for _, state := range s.States() {
		if state.Pool != nil {
			open = append(open, state.Pool)
		}
	}
	return open
}

// inlineClosed is why a pool for inline volumes is not open; nil if all are.
func (s *Set) inlineClosed() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, slot := range s.pools {
		if slot.cfg.Ephemeral && slot.err != nil {
			return unavailable(slot.err)
		}
	}
	return nil
}

func (p *Pool) inline(backend, id string) (volume.Volume, error) {
	v, err := p.Lookup(id)
	switch {
	case errors.Is(err, volume.ErrDamaged) && p.probably(id) == backend:
		return volume.Volume{ID: p.ID(backend, id)}, err
	case errors.Is(err, volume.ErrDamaged), err == nil && v.ID.Backend != backend:
		return volume.Volume{}, volume.Errorf(volume.ErrNotFound, "inline volume %q in pool %q is of another backend", id, p.cfg.Name)
	}
	return v, err
}

// inlines returns the names of inline volumes of a backend.
func (p *Pool) inlines(backend string) (names []string) {
	for dir, r := range p.ledger.Reservations() {
		name, isVolume := strings.CutPrefix(dir, volumesDir+"/")
		if isVolume && r.Backend == backend && volume.InlineID(name) {
			names = append(names, name)
		}
	}
	return names
}
