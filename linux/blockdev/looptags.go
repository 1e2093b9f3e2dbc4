package blockdev

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/linux/mount"
)

// LoopTags finds loop devices by their tags. It caches the device of each tag, and verifies each time that
// the device still has the tag.
type LoopTags struct {
	accept func(backingFile string) bool

	mu      sync.Mutex
	numbers map[string]int // the cached numbers of devices, by tag
	// attached counts the calls of Attach.
	attached int
	// scanned is when the last complete scan of all devices began, during which no device was attached. It is zero before the first one.
	scanned time.Time
}

// NewLoopTags returns a LoopTags for the devices that BoundLoops returns for accept. It never examines other
// devices, because reading a tag reads attributes of the backing file, which may be on a server that does not
// respond.
func NewLoopTags(accept func(backingFile string) bool) *LoopTags {
	return &LoopTags{accept: accept, numbers: map[string]int{}}
}

// Find returns the number of the bound device with a tag.
func (t *LoopTags) Find(tag string) (number int, ok bool, err error) {
	return t.FindSince(tag, time.Now())
}

// FindKnown does the same as Find, but scans all devices only once. After that, it does not find a device that
// another process binds. It is faster than Find for a tag that rarely has a device.
func (t *LoopTags) FindKnown(tag string) (number int, ok bool, err error) {
	return t.FindSince(tag, time.Time{})
}

// FindSince does the same as Find, but scans all devices only if no scan has begun after since, or the cached device has another tag now.
// Otherwise it does not find a device that another process has bound after since.
func (t *LoopTags) FindSince(tag string, since time.Time) (number int, ok bool, err error) {
	t.mu.Lock()
	number, known := t.numbers[tag]
	scanned := t.scanned.After(since)
	t.mu.Unlock()
	if !known && scanned {
		return 0, false, nil
	}
	if known {
		if current, err := LoopTag(number); err != nil || current == tag {
			return number, err == nil, err
		}
	}
	return t.scan(tag)
}

// scan returns the device of one tag. It caches the tags of all devices, unless a device is attached meanwhile.
func (t *LoopTags) scan(tag string) (int, bool, error) {
	t.mu.Lock()
	attached, began := t.attached, time.Now()
	t.mu.Unlock()
	bound, err := BoundLoops(t.accept)
	if err != nil {
		return 0, false, err
	}
	var unreadable error
	current := map[string]int{}
	for _, l := range bound {
		found, err := LoopTag(l.Number)
		if err == nil {
			current[found] = l.Number
		} else if !errors.Is(err, unix.ENOENT) { // ENOENT: the device was removed after BoundLoops
			unreadable = err
		}
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case t.attached != attached || began.Before(t.scanned): // what the scan has read may be old
	case unreadable != nil:
		maps.Copy(t.numbers, current)
	default:
		t.numbers, t.scanned = current, began
	}
	number, ok := current[tag]
	if ok {
		unreadable = nil
	}
	return number, ok, unreadable
}

// Forget removes a tag from the cache.
func (t *LoopTags) Forget(tag string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.numbers, tag)
}

// Attach does the same as AttachLoop, and caches the device.
func (t *LoopTags) Attach(ctx context.Context, image *os.File, c LoopConfig) (*Loop, error) {
	l, err := AttachLoop(ctx, image, c)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.numbers[c.Tag] = l.Number
	t.attached++
	return l, nil
}

// AttachReadOnly returns the read-only device with a tag. If no device has the tag, it binds one to the file
// that open returns, with sectors of sectorSize bytes. The device stays bound until Detach.
func (t *LoopTags) AttachReadOnly(ctx context.Context, tag string, sectorSize int, open func() (*os.File, error)) (mount.BlockDevice, error) {
	number, ok, err := t.FindKnown(tag)
	if err == nil && ok {
		// Another process may have set autoclear.
		ok, err = RecoverLoop(number, tag, false)
	}
	if err != nil || ok {
		return &DeviceSource{Path: LoopPath(number)}, err
	}
	backing, err := open()
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	l, err := t.Attach(ctx, backing, LoopConfig{SectorSize: sectorSize, Tag: tag, ReadOnly: true})
	if err != nil {
		return nil, err
	}
	return &DeviceSource{Path: LoopPath(l.Number)}, l.Close()
}

// ErrDeviceMounted means that a device is mounted, or that its node is bind-mounted.
var ErrDeviceMounted = errors.New("is still mounted")

// Detach does the same as DetachLoop for the device with a tag. It is no error if no device has the tag. The error is
// ErrDeviceMounted if the device is mounted.
func (t *LoopTags) Detach(ctx context.Context, tag string) error {
	number, ok, err := t.Find(tag)
	if err != nil || !ok {
		return err
	}
	mounts, err := mount.OfDevice(LoopPath(number))
	if err != nil {
		return err
	}
	if len(mounts) > 0 {
		return fmt.Errorf("%s %w at %s", LoopPath(number), ErrDeviceMounted, mounts[0].Mountpoint)
	}
	return DetachLoop(ctx, number, tag)
}

// DetachUnmounted does the same as Detach for a device that FindKnown finds. It is no error if the device is mounted,
// and it then stays attached.
func (t *LoopTags) DetachUnmounted(ctx context.Context, tag string) error {
	if _, ok, err := t.FindKnown(tag); err != nil || !ok {
		return err
	}
	err := t.Detach(ctx, tag)
	if errors.Is(err, ErrDeviceMounted) {
		return nil
	}
	return err
}
