package blockdev

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"
	"k8s.io/klog/v2"
	"k8s.io/utils/lru"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/linux/sys"
)

const (
	// maxTemplateDevice is the largest device in bytes that is formatted from a template. For an ext4, mkfs
	// takes about 1 ms per GiB.
	maxTemplateDevice = 16 * gib
	// maxTemplateMemory limits the memory of all templates. A template of an ext4 has 0.6 MiB for 1 GiB and 4.2 MiB for 16 GiB,
	// most of it for later growth (the resize inode), that of a btrfs 0.8 MiB, and that of an xfs 0.2 MiB. So the templates of
	// about 25 sizes of 1 GiB, or of 3 sizes of 16 GiB, are kept. Making one again takes as long as mkfs.
	maxTemplateMemory = 16 * mib
	// maxTemplateSize limits the blocks of one template.
	maxTemplateSize = 5 * mib
	// entryMemory is what an entry of the cache needs in addition to the blocks.
	entryMemory = 16 << 10
	// maxTemplateTime limits mkfs, because mkfs.btrfs reads the backing file of every device in the mount table, and one of
	// them may be on a server that does not answer.
	maxTemplateTime = 20 * time.Second
)

// errUnsuitable means that no template can be made of a filesystem that mkfs has created.
var errUnsuitable = errors.New("not suitable for a template")

// template holds the blocks of a new filesystem of one size that are not zero. Each copy of it has its own UUIDs.
type template struct {
	// extents are the blocks in the order in which they are written. The last extent contains the primary superblock.
	extents []extent
	// identities are the UUIDs that a copy replaces by new ones.
	identities [][]byte
}

// extent is a contiguous part of a template.
type extent struct {
	offset     int64
	data       []byte
	structures []structure
}

// templateCache contains the templates that were used last, up to maxTemplateMemory.
type templateCache struct {
	templates *lru.Cache // of *template; nil for filesystems of which none can be made
	mu        sync.Mutex
	bytes     int // the memory of the templates
}

func newTemplateCache() *templateCache {
	c := &templateCache{}
	c.templates = lru.NewWithEvictionFunc(0, func(_ lru.Key, t any) { c.bytes -= t.(*template).memory() })
	return c
}

func (c *templateCache) get(key string) (*template, bool) {
	t, ok := c.templates.Get(key)
	if !ok {
		return nil, false
	}
	return t.(*template), true
}

func (c *templateCache) add(key string, t *template) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.templates.Remove(key) // Add would replace it without the eviction function
	c.templates.Add(key, t)
	for c.bytes += t.memory(); c.bytes > maxTemplateMemory; {
		c.templates.RemoveOldest()
	}
}

// template returns the template for a filesystem of size bytes; nil if there is none. If the cache has none, it
// creates one with mkfs. It returns nil early enough that half of the time until the deadline of ctx is left.
func (f *Formatter) template(ctx context.Context, size int64, spec FormatSpec) *template {
	if f.turns[spec.FSType] == nil || spec.Stale || size > maxTemplateDevice {
		return nil
	}
	key := fmt.Sprintf("%s %d %d %q", spec.FSType, size, spec.SectorSize, spec.Options)
	if t, ok := f.templates.get(key); ok {
		return t
	}
	// Callers with the same key share one mkfs, which must not end with the context of the first caller.
	made := f.making.DoChan(key, func() (any, error) {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), maxTemplateTime)
		defer cancel()
		t, err := f.makeTemplate(ctx, size, spec)
		if err == nil || errors.Is(err, errUnsuitable) {
			f.templates.add(key, t)
		}
		if err != nil {
			klog.FromContext(ctx).Info("No template of this filesystem", "filesystem", spec.FSType, "bytes", size, "reason", err)
		}
		return t, nil
	})
	wait, cancel := context.WithTimeout(ctx, templateTime(ctx))
	defer cancel()
	select {
	case <-wait.Done():
		return nil
	case r := <-made:
		return r.Val.(*template)
	}
}

// templateTime returns the time for which a call waits for a template: at most half of the time until its deadline.
func templateTime(ctx context.Context) time.Duration {
	if deadline, ok := ctx.Deadline(); ok {
		return min(maxTemplateTime, time.Until(deadline)/2)
	}
	return maxTemplateTime
}

// makeTemplate runs mkfs on a file in memory and keeps the blocks that are not zero. It makes one template of a type at a
// time, because mkfs.xfs writes 64 MiB of zeros to the file.
func (f *Formatter) makeTemplate(ctx context.Context, size int64, spec FormatSpec) (*template, error) {
	turn := f.turns[spec.FSType]
	if err := turn.Acquire(ctx, 1); err != nil {
		return nil, fmt.Errorf("waiting for another template: %w", err)
	}
	defer turn.Release(1)
	mem, err := memoryFile()
	if err != nil {
		return nil, err
	}
	defer mem.Close()
	if err := mem.Truncate(size); err != nil {
		return nil, fmt.Errorf("template: %w", err)
	}
	if err := runMkfs(ctx, mem, size, spec); err != nil {
		return nil, err
	}
	t, err := readTemplate(mem, size, layouts[spec.FSType])
	if err == nil && t.size() > maxTemplateSize {
		err = fmt.Errorf("template of %d bytes: %w", t.size(), errUnsuitable)
	}
	if err != nil {
		return nil, err
	}
	return t, nil
}

// memoryFile creates a file in memory that cannot be executed. Linux before 6.3 does not know MFD_NOEXEC_SEAL.
func memoryFile() (*os.File, error) {
	const name = "trivet-template"
	fd, err := unix.MemfdCreate(name, unix.MFD_CLOEXEC|unix.MFD_NOEXEC_SEAL)
	if errors.Is(err, unix.EINVAL) {
		fd, err = unix.MemfdCreate(name, unix.MFD_CLOEXEC)
	}
	if err != nil {
		return nil, fmt.Errorf("memfd_create: %w", err)
	}
	return os.NewFile(uintptr(fd), name), nil
}

// readTemplate reads a filesystem that mkfs has just created on a file of size bytes. The error is errUnsuitable if a
// UUID of the filesystem is in a place that the layout does not know.
func readTemplate(f *os.File, size int64, l layout) (*template, error) {
	t := &template{}
	primary, err := t.readBlocks(f, size, l)
	if err != nil {
		return nil, err
	}
	super := primary.data[l.super-primary.offset:]
	t.extents, t.identities = append(t.extents, primary), l.identities(super)
	for i := range t.extents {
		if err := t.extents[i].findStructures(t.identities, super, l); err != nil {
			return nil, err
		}
		t.extents[i].data = bytes.Clone(t.extents[i].data) // without the spare capacity of append
	}
	return t, nil
}

// readBlocks reads the blocks that are not zero. It returns the block with the primary superblock, and adds the other
// blocks to the template.
func (t *template) readBlocks(f *os.File, size int64, l layout) (primary extent, err error) {
	buf, zeros := make([]byte, 16*l.unit), make([]byte, l.unit)
	for at := int64(0); at < size; {
		start, _, err := sys.NextData(f, at, size)
		if err != nil {
			return primary, fmt.Errorf("template: %w", err)
		}
		if start == size {
			break
		}
		at = start - start%int64(l.unit)
		read := buf[:min(int64(len(buf)), size-at)]
		if _, err := f.ReadAt(read, at); err != nil {
			return primary, fmt.Errorf("template: %w", err)
		}
		for ; len(read) > 0; at += int64(l.unit) {
			block := read[:min(l.unit, len(read))]
			read = read[len(block):]
			switch {
			case at <= l.super && l.super < at+int64(l.unit):
				primary = extent{offset: at, data: bytes.Clone(block)}
			case !bytes.Equal(block, zeros[:len(block)]):
				t.add(at, block)
			}
		}
	}
	if primary.data == nil {
		return primary, fmt.Errorf("mkfs wrote no superblock: %w", ErrNoFS)
	}
	return primary, nil
}

// add adds a block of the filesystem. The offsets must increase.
func (t *template) add(offset int64, block []byte) {
	if n := len(t.extents); n > 0 {
		if last := &t.extents[n-1]; last.offset+int64(len(last.data)) == offset {
			last.data = append(last.data, block...)
			return
		}
	}
	t.extents = append(t.extents, extent{offset: offset, data: bytes.Clone(block)})
}

// size returns the size of the blocks in bytes.
func (t *template) size() (size int) {
	for _, e := range t.extents {
		size += len(e.data)
	}
	return size
}

// memory returns the memory in bytes that an entry of the cache needs.
func (t *template) memory() int {
	if t == nil {
		return entryMemory
	}
	return t.size() + entryMemory
}

// write copies the template to a blank image, with new UUIDs. It writes the primary superblock last; half is the crash
// point before that.
func (t *template) write(image *os.File, half crashpoint.Point) error {
	ids := make([]uuid.UUID, len(t.identities))
	for i := range ids {
		ids[i] = uuid.New()
	}
	for i, e := range t.extents {
		if i == len(t.extents)-1 {
			crashpoint.Here(half)
		}
		if _, err := image.WriteAt(e.with(ids), e.offset); err != nil {
			return err
		}
	}
	return nil
}

// with returns the data of an extent with other identities.
func (e extent) with(ids []uuid.UUID) []byte {
	if len(e.structures) == 0 {
		return e.data
	}
	data := bytes.Clone(e.data)
	for _, s := range e.structures {
		for _, p := range s.places {
			copy(data[p.at:], ids[p.identity][:])
		}
		s.seal(data[s.start:s.end])
	}
	return data
}
