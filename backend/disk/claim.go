package disk

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"

	"golang.org/x/sync/semaphore"
	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/backend"
	"github.com/trivet-csi/trivet/internal/trace"
	"github.com/trivet-csi/trivet/linux/blockdev"
	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

// claim is a free disk that is reserved for a new volume. Until the claim is closed, no other call claims
// a disk of the pool, because two device nodes may be the same disk.
type claim struct {
	*blockdev.Claim
	claiming *semaphore.Weighted
}

// Close releases the disk, and lets other calls claim disks.
func (c *claim) Close() error {
	defer c.claiming.Release(1)
	return c.Claim.Close()
}

// room is the size that a new volume needs on its disk.
type room struct {
	volume.Range
	// min is the smallest capacity in bytes.
	min int64
	// header is the size of the header of an encrypted volume in bytes, which is not a part of the capacity.
	header int64
	// sector is the size of the largest sectors in bytes that the content allows; 0 for any.
	sector int
}

// fits reports whether a disk has the size, of whose bytes size are for a volume, and the size of sectors.
func (r room) fits(size int64, sector int) bool {
	capacity := size - r.header
	return capacity >= r.min && r.Holds(capacity) && (r.sector == 0 || sector <= r.sector)
}

// String describes the size of the disk for errors.
func (r room) String() string {
	text := volume.ExactSize(max(r.Required, r.min) + r.header)
	if r.Limit > 0 {
		text += " and at most " + volume.ExactSize(r.Limit+r.header)
	}
	if r.sector > 0 {
		text += fmt.Sprintf(", with sectors of at most %d bytes", r.sector)
	}
	return text
}

// claimDisk claims the smallest free disk that r fits. The caller closes the claim. claimDisk waits a limited time for
// disks that are being wiped, and returns ErrExhausted if no disk is free.
func claimDisk(ctx context.Context, p *pool.Pool, r room) (*claim, error) {
	if err := r.Validate(); err != nil {
		return nil, err
	}
	if r.Limit > 0 && r.Limit < r.min {
		return nil, volume.Errorf(volume.ErrOutOfRange, "capacity_range.limit_bytes %d: the smallest volume of this kind has %s: raise the limit", r.Limit, volume.ExactSize(r.min))
	}
	s := storageOf(p)
	c, err := s.claimAfter(ctx, p.Check, r)
	if !errors.Is(err, volume.ErrExhausted) {
		return c, err
	}
	// The semaphore is not held during the wait, so that other calls can claim free disks.
	p.Trash.AwaitEmpty()
	return s.claimAfter(ctx, s.Scan, r)
}

// claimAfter calls step, and then claims a free disk. Only one call at a time does this.
func (s *storage) claimAfter(ctx context.Context, step func() error, r room) (*claim, error) {
	if err := trace.Acquire(ctx, s.claiming, "wait for claim of a disk"); err != nil {
		return nil, err
	}
	err := step()
	if err == nil {
		var c *blockdev.Claim
		if c, err = s.claimSmallest(ctx, r); err == nil {
			return &claim{c, s.claiming}, nil
		}
	}
	s.claiming.Release(1)
	return nil, err
}

// claimSmallest claims the smallest suitable disk that was free at the last scan.
func (s *storage) claimSmallest(ctx context.Context, r room) (*blockdev.Claim, error) {
	all := s.states()
	slices.SortStableFunc(all, func(a, b diskState) int { return cmp.Compare(a.disk.Room(), b.disk.Room()) })
	free, wiping := 0, 0
	for _, st := range all {
		switch st.reason {
		case blockdev.DiskFree:
			free++
		case diskWiping:
			wiping++
			continue
		default:
			continue
		}
		if !r.fits(st.disk.Room(), st.disk.SectorSize) {
			continue
		}
		c, err := st.disk.Claim(ctx)
		if err == nil {
			return c, nil
		}
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		klog.FromContext(ctx).Error(err, "Claiming a free disk failed; trying the next one", "pool", s.cfg.Name, "disk", st.disk.Path)
	}
	return nil, volume.Errorf(volume.ErrExhausted, "pool %q has no free disk of at least %v (%d disks match disks.match, %d of them are free, %d are being wiped): add disks, delete volumes, wait until disks are wiped, or request another size (trivet doctor describes each disk)",
		s.cfg.Name, r, len(all), free, wiping)
}

// create creates a volume on a claimed disk, and closes the claim. It returns ErrDiskRefuses if the disk
// cannot be written. The disk is then not free until the next scan, and the caller may claim another
// one. fill, if not nil, writes the content to the disk, and records the state of the filesystem in dir.
func create(ctx context.Context, p *pool.Pool, v volume.Volume, c *claim, fill func(dir *os.Root) error) error {
	s := storageOf(p)
	release := sync.OnceFunc(func() { s.release(c) })
	err := p.Create(ctx, v, func(dir *os.Root) error {
		if err := c.Mark(v.CoName); err != nil || fill == nil {
			return err
		}
		release() // the mark reserves the disk
		if err := backend.CreateFlag(dir, copyingFile); err != nil {
			return err
		}
		return fill(dir)
	})
	release()
	s.noteRefusal(c, err)
	return err
}

// release closes a claim, and inspects its disk again.
func (s *storage) release(c *claim) {
	_ = c.Claim.Close() // from now on other processes can open the disk
	s.rescan(c.Disk.Path)
	c.claiming.Release(1)
}

// noteRefusal records that a claimed disk cannot be written, if err says so. It is called after release.
func (s *storage) noteRefusal(c *claim, err error) {
	if errors.Is(err, blockdev.ErrDiskRefuses) {
		s.replaceState(diskState{disk: c.Disk, reason: blockdev.DiskUnreadable, detail: err.Error()})
	}
}
