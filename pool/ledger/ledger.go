// Package ledger counts the bytes that the pools of this process have promised to volumes
// and snapshots, and refuses to promise a byte twice. The pools on one filesystem share
// one lock and one measurement of foreign use, which is all usage except that of the pools' volumes.
//
// A ledger can always be rebuilt from the records on the disk, so the reservation of a folder is set
// to an absolute value and never incremented. Package pool reads the records and removes the folders.
package ledger

import (
	"errors"
	"maps"
	"slices"
	"time"

	"github.com/trivet-csi/trivet/volume"
)

// Pool has the operations of a pool that its ledger needs.
type Pool interface {
	// Space reads the size and the free space of the pool's filesystem.
	Space() (Space, error)
	// Used measures the usage of the pool's volumes, in bytes.
	Used() (int64, error)
	// Drain waits until the pool's trash is empty, except for entries whose removal keeps failing, or
	// until atMost has passed.
	Drain(atMost time.Duration)
}

// Ledger contains the reservations of one pool. The reservation of a folder has the values of its
// record, or those that a running call has reserved. Folders in the trash count until their space
// is free.
type Ledger struct {
	// All ledgers on the filesystem share its lock.
	*filesystem
	config Config
	// pool is nil until the pool's directory is open. complete is true after its volumes were read.
	pool     Pool
	complete bool
	// used is the usage of the pool's volumes at the last measurement, in bytes. foreignInDirectory is
	// the foreign use within Space.Directory.
	used, foreignInDirectory int64

	reservations map[string]Reservation // by folder, below the pool
	promised     int64
	// snapshots is the number of snapshots, sets the number of their folders.
	snapshots, sets int
	// attached are the controller-published volumes of a node-local pool, by folder.
	attached map[string]bool
	// pending are the folders that this process is making, growing or removing. touched are
	// those that were pending at any time since a reading of the folders began, so what was read of
	// them may be outdated. readers is the number of readings under way.
	pending, touched map[string]bool
	readers          int
}

// Open connects the ledger with its pool.
func (l *Ledger) Open(c Config, p Pool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.config, l.pool = c, p
}

// Complete records that all of the pool's folders were read.
func (l *Ledger) Complete() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.complete = true
}

// Set sets the reservation of a folder.
func (l *Ledger) Set(dir string, r Reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.set(dir, r)
}

// set is Set for a caller that holds l.mu.
func (l *Ledger) set(dir string, r Reservation) {
	existing := l.reservations[dir]
	l.promised += r.Bytes - existing.Bytes
	l.snapshots += len(r.Snapshots) - len(existing.Snapshots)
	l.sets += r.sets() - existing.sets()
	if r.Inode == 0 {
		r.Inode = existing.Inode
	}
	l.reservations[dir] = r
}

// Remove removes the reservation of a folder, and returns it.
func (l *Ledger) Remove(dir string) (had Reservation, ok bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	had, ok = l.reservations[dir]
	l.remove(dir)
	return had, ok
}

// remove is Remove for a caller that holds l.mu.
func (l *Ledger) remove(dir string) {
	existing := l.reservations[dir]
	l.promised -= existing.Bytes
	l.snapshots -= len(existing.Snapshots)
	l.sets -= existing.sets()
	delete(l.reservations, dir)
}

// Move moves the reservation of a folder to its entry in the trash. r is used if the ledger does
// not have the folder.
func (l *Ledger) Move(dir, entry string, r Reservation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if existing, ok := l.reservations[dir]; ok {
		r = existing
	}
	l.remove(dir)
	l.set(entry, r.InTrash())
}

// Rename moves the reservation of a folder to another folder.
func (l *Ledger) Rename(dir, to string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	r := l.reservations[dir]
	l.remove(dir)
	l.set(to, r)
}

// Shrink reduces the reservation of a folder to a number of bytes.
func (l *Ledger) Shrink(dir string, bytes int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if r, ok := l.reservations[dir]; ok {
		r.Bytes = min(r.Bytes, bytes)
		l.set(dir, r)
	}
}

// Recount sets the reservation of a folder to r, which was read with the result err. ErrNotFound
// removes the reservation; another error changes nothing.
func (l *Ledger) Recount(dir string, r Reservation, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.recount(dir, r, err)
}

// recount is Recount for a caller that holds l.mu.
func (l *Ledger) recount(dir string, r Reservation, err error) {
	switch {
	case err == nil:
		l.set(dir, r)
	case errors.Is(err, volume.ErrNotFound):
		l.remove(dir)
	}
}

// Begin marks a folder as pending until end is called: this process is changing it.
func (l *Ledger) Begin(dir string) (end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.pending[dir], l.touched[dir] = true, true
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		delete(l.pending, dir)
	}
}

// BeginReading begins a reading of the pool's folders, which ends when end is called. known are
// the present reservations.
func (l *Ledger) BeginReading() (known map[string]Reservation, end func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.readers++; l.readers == 1 {
		l.touched = maps.Clone(l.pending)
	}
	return maps.Clone(l.reservations), func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.readers--
	}
}

// RecountUntouched is Recount during a reading. It does nothing for a folder that this process has
// changed since the reading began.
func (l *Ledger) RecountUntouched(dir string, r Reservation, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.touched[dir] {
		l.recount(dir, r, err)
	}
}

// RemoveMissing removes the reservations of the known folders that a reading has not found, except
// folders that this process has changed since the reading began.
func (l *Ledger) RemoveMissing(known map[string]Reservation, found map[string]bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for dir := range known {
		if !found[dir] && !l.touched[dir] {
			l.remove(dir)
		}
	}
}

// Lacks tells whether the ledger has no reservation of a folder, and this process is not making the
// folder.
func (l *Ledger) Lacks(dir string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.reservations[dir]
	return !ok && !l.pending[dir]
}

// Reservations returns a copy of all reservations, by folder.
func (l *Ledger) Reservations() map[string]Reservation {
	l.mu.Lock()
	defer l.mu.Unlock()
	return maps.Clone(l.reservations)
}

// find returns a folder whose reservation matches; empty if there is none.
func (l *Ledger) find(match func(Reservation) bool) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	for dir, r := range l.reservations {
		if match(r) {
			return dir
		}
	}
	return ""
}

// HasTrash tells whether deleted volumes still take space.
func (l *Ledger) HasTrash() bool {
	return l.find(func(r Reservation) bool { return r.Trashed && r.Bytes > 0 }) != ""
}

// HasQuota tells whether any volume has a quota ID, volumes in the trash included.
func (l *Ledger) HasQuota(id uint64) bool {
	return l.find(func(r Reservation) bool { return r.Quota.ID == id }) != ""
}

// SharedOf returns the size of the data that a volume has written and that snapshots or copies may
// still contain, in bytes.
func (l *Ledger) SharedOf(v volume.ID) (sum int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, r := range l.reservations {
		if slices.Contains(r.Owners, v) {
			sum += r.Shared
		}
		for _, s := range r.Snapshots {
			if slices.Contains(s.Writers(), v) {
				sum += s.Bytes
			}
		}
	}
	return sum
}

// VolumesByBackend counts the volumes of each backend, those in the trash included.
func (l *Ledger) VolumesByBackend() map[string]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := map[string]int{}
	for _, r := range l.reservations {
		if r.Snapshots == nil {
			n[r.Backend]++
		}
	}
	return n
}

// CountsAttached tells whether the ledger counts the controller-published volumes. On an export it
// does not, because other processes publish volumes too.
func (l *Ledger) CountsAttached() bool { return !l.config.Shared }

// SetAttached records whether the volume of a folder is controller-published, if CountsAttached.
func (l *Ledger) SetAttached(dir string, attached bool) {
	if !l.CountsAttached() {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if attached {
		l.attached[dir] = true
	} else {
		delete(l.attached, dir)
	}
}

// AttachedCount returns the number of controller-published volumes of a backend.
func (l *Ledger) AttachedCount(backend string) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := 0
	for dir := range l.attached {
		if l.reservations[dir].Backend == backend {
			n++
		}
	}
	return n
}
