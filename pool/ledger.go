package pool

import (
	"os"

	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/pool/ledger"
)

// Usage is a pool's capacity at one moment, and what its background work does.
type Usage struct {
	ledger.Usage
	// Copies are under way, and Copied is what copies of this process have copied since
	// it started, in bytes.
	Copies int
	Copied int64
	// Trash counts what was deleted and is not removed, TrashStuck those of it that could
	// not be removed.
	Trash, TrashStuck int
}

// Usage reads the pool's capacity. Of a shared pool what other processes promised
// in the last minute may be missing, and in one that serves a node alone all that
// is promised.
func (p *Pool) Usage() (Usage, error) {
	s, err := p.Space()
	if err != nil {
		return Usage{}, err
	}
	p.Trash.dropRemovedTrash()
	u := Usage{Usage: p.ledger.Usage(s)}
	if p.storage != nil {
		u.Usage = p.storage.Usage(u.Usage)
	}
	u.Copies, u.Copied = p.Jobs.state()
	u.Trash, u.TrashStuck = p.Trash.reaper.count(), len(p.Trash.reaper.stuck())
	return u, nil
}

// VolumesByBackend counts the volumes of each backend, those in the trash
// included.
func (p *Pool) VolumesByBackend() map[string]int { return p.ledger.VolumesByBackend() }

// AttachedCount is the number of controller-published volumes of a backend; 0 for a
// shared pool: where each of its volumes is published is on the export alone.
func (p *Pool) AttachedCount(backend string) int { return p.ledger.AttachedCount(backend) }

// joinLedger makes the ledger of a pool at a site. A pool on storage of its own
// promises nothing of the filesystem that its records are on.
func joinLedger(f *ledger.Filesystems, at site, c Config) *ledger.Ledger {
	if c.Section != nil {
		return ledger.New()
	}
	return f.Join(at.at)
}

// accounts reads what the ledger of a pool counts: reservations, and what volumes use.
type accounts struct {
	*store
	quotas    *Quotas
	deleted   *Trash
	snapshots *Snapshots
}

// allocated is the disk space of one file in bytes; 0 if there is none.
func allocated(dir *os.File, path string) int64 {
	st, err := beneath.Stat(dir, path)
	if err != nil {
		return 0
	}
	return st.Blocks * 512
}
