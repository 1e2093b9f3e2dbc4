package pool

import "github.com/trivet-csi/trivet/pool/ledger"

// Usage is a pool's capacity and the state of its background work, at one moment.
type Usage struct {
	ledger.Usage
	// Copies is the number of copies under way, Copied the number of bytes that this process
	// has copied since it started.
	Copies int
	Copied int64
	// Trash is the number of entries in the trash, TrashStuck the number of those whose removal
	// failed.
	Trash, TrashStuck int
}

// Usage reads the pool's capacity. In a shared pool, reservations that other processes made in the
// last minute may be missing; a process without the Controller service may know none of them.
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

// VolumesByBackend counts the volumes of each backend, including those in the trash.
func (p *Pool) VolumesByBackend() map[string]int { return p.ledger.VolumesByBackend() }

// AttachedCount is the number of controller-published volumes of a backend; 0 for a shared pool,
// whose publications are recorded only on the export.
func (p *Pool) AttachedCount(backend string) int { return p.ledger.AttachedCount(backend) }

// joinLedger makes the ledger of a pool at a site. The volumes of a pool with a section take no space
// on the filesystem of the pool's directory.
func joinLedger(f *ledger.Filesystems, at site, c Config) *ledger.Ledger {
	if c.Section != nil {
		return ledger.New()
	}
	return f.Join(at.at)
}
