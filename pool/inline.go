package pool

import (
	"errors"
	"strings"

	"github.com/trivet-csi/trivet/volume"
)

// Inline finds an inline volume of a backend in the pools of this node, by the kubelet's ID. It
// does not read the disk of a pool whose ledger lacks the volume, because the disk may hang. The error
// is ErrNotFound, or ErrUnavailable while a pool that may have the volume is not open. With
// ErrDamaged the returned volume has only its ID.
func (s *Set) Inline(backend, id string) (volume.Volume, error) {
	var damaged volume.Volume
	failed := s.inlineClosed()
	for _, p := range s.openLocalPools() {
		if p.ledger.Lacks(FolderPath(id)) {
			continue
		}
		v, err := p.inline(backend, id)
		if err == nil {
			return v, nil
		}
		if !errors.Is(err, volume.ErrNotFound) {
			damaged, failed = v, err
		}
	}
	if failed == nil {
		failed = volume.Errorf(volume.ErrNotFound, "inline volume %q is not on this node", id)
	}
	return damaged, failed
}

// Inlines returns the IDs of all inline volumes of a backend in the open pools of this node. The error
// is ErrUnavailable while a pool that may contain more is not open.
func (s *Set) Inlines(backend string) ([]string, error) {
	closed := s.inlineClosed()
	var ids []string
	for _, p := range s.openLocalPools() {
		for dir, r := range p.ledger.Reservations() {
			name, isVolume := strings.CutPrefix(dir, volumesDir+"/")
			if isVolume && r.Backend == backend && volume.InlineID(name) {
				ids = append(ids, name)
			}
		}
	}
	return ids, closed
}

// openLocalPools returns the node-local pools that are open.
func (s *Set) openLocalPools() []*Pool {
	var open []*Pool
	if s.shared.Mount != nil {
		return nil
	}
	for _, state := range s.States() {
		if state.Pool != nil {
			open = append(open, state.Pool)
		}
	}
	return open
}

// inlineClosed returns the error of a pool for inline volumes that is not open; nil if all are open.
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

// inline is Set.Inline for one pool.
func (p *Pool) inline(backend, id string) (volume.Volume, error) {
	v, err := p.Lookup(id)
	switch {
	case errors.Is(err, volume.ErrDamaged) && p.guessBackend(p.volumes, id) == backend:
		return volume.Volume{ID: p.ID(backend, id)}, err
	case errors.Is(err, volume.ErrDamaged), err == nil && v.ID.Backend != backend:
		return volume.Volume{}, volume.Errorf(volume.ErrNotFound, "inline volume %q in pool %q belongs to another backend", id, p.cfg.Name)
	}
	return v, err
}
