package pool

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/google/uuid"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// receivedFile, in the folder of a volume, says that the volume still has the content that was received from another node. A
// later snapshot of the same volume can then be received as differences from this content. The file is removed before the volume is
// staged for the first time.
const receivedFile = "received"

// contentFile, in the folder of a volume, has a random ID of the content that the volume has while it is neither staged nor
// expanded. An interrupted transfer of the volume to another node continues with the same content.
const contentFile = "content"

// received is the content of receivedFile.
type received struct {
	// Identity and Lineage are those of the content (volume.Manifest).
	Identity string    `json:"identity"`
	Lineage  volume.ID `json:"lineage"`
	// Created is the time at which the snapshot was taken. It is zero if the driver that received the content did not know it.
	Created time.Time `json:"created,omitzero"`
	// Modified is the modification time of the image or directory, in nanoseconds since 1970. Another time means that the image was
	// replaced or grown. It is not used for data on storage.
	Modified int64 `json:"modifiedNanoseconds,omitzero"`
}

// MarkReceived records, in the folder of a volume in tmp, that the image has the content of a snapshot of another node, and that
// it may share its blocks with other volumes. The image, or the directory or device of a volume without an image, is durable, and
// does not change until BeginChange.
func MarkReceived(dir *os.Root, image *os.File, content volume.Manifest) error {
	if content.Lineage == (volume.ID{}) {
		return nil
	}
	info, err := image.Stat()
	if err != nil {
		return err
	}
	r := received{Identity: content.Identity, Lineage: content.Lineage, Created: content.Created}
	if info.Mode()&os.ModeDevice == 0 {
		r.Modified = info.ModTime().UnixNano()
	}
	b, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return atomicfile.Write(dir, receivedFile, b)
}

// ContentID returns an ID of the content that a volume has until BeginChange. The caller has locked the volume, which is not staged.
func (i *Images) ContentID(name string) (string, error) {
	path := volumePath(name, contentFile)
	b, err := i.files.Read(i.dir, path)
	if err == nil && len(b) > 0 {
		return string(b), nil
	}
	if err != nil && !beneath.IsNotExist(err) {
		return "", err
	}
	id := uuid.NewString()
	return id, atomicfile.Write(i.root, path, []byte(id))
}

// BeginChange removes receivedFile and contentFile durably, because the data of a volume is about to change. The caller has locked
// the volume.
func (i *Images) BeginChange(name string) error {
	if i.Shared() { // no image on an export was received, or has a contentFile
		return nil
	}
	folder, err := beneath.OpenDir(i.volumes, name)
	if err != nil {
		return beneath.IgnoreGone(err) // the volume is being deleted
	}
	defer folder.Close()
	removed := false
	for _, file := range []string{receivedFile, contentFile} {
		err := unix.Unlinkat(int(folder.Fd()), file, 0)
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%s of volume %q in pool %q: %w", file, name, i.cfg.Name, err)
		}
		removed = removed || err == nil
	}
	if !removed {
		return nil
	}
	return folder.Sync()
}

// maxBases bounds the contents that are offered to the other node.
const maxBases = 64

// unchanged returns the identities of the received contents with a lineage that volumes of the pool still have, the newest first.
func (i *Images) unchanged(lineage volume.ID) ([]string, error) {
	if lineage == (volume.ID{}) {
		return nil, nil
	}
	names, err := beneath.Names(i.volumes, ".")
	if err != nil {
		return nil, err
	}
	var found []received
	for _, name := range names {
		if r := i.receivedContent(name); r.Lineage == lineage {
			found = append(found, r)
		}
	}
	slices.SortFunc(found, func(a, b received) int { return cmp.Compare(b.Modified, a.Modified) })
	var identities []string
	for _, r := range found[:min(len(found), maxBases)] {
		identities = append(identities, r.Identity)
	}
	return identities, nil
}

// Copies returns the volumes of other nodes of which this pool has copies that were never staged, and when the newest copied
// snapshot of each was taken.
func (i *Images) Copies() (map[volume.ID]time.Time, error) {
	if i.Shared() { // no image on an export was received
		return nil, nil
	}
	names, err := beneath.Names(i.volumes, ".")
	if err != nil {
		return nil, err
	}
	newest := map[volume.ID]time.Time{}
	for _, name := range names {
		if r := i.receivedContent(name); r.Created.After(newest[r.Lineage]) {
			newest[r.Lineage] = r.Created
		}
	}
	return newest, nil
}

// receivedContent returns which received content a volume still has. The result is empty if it has none.
func (i *Images) receivedContent(name string) (r received) {
	b, err := i.files.Read(i.volumes, name+"/"+receivedFile)
	if err != nil || json.Unmarshal(b, &r) != nil {
		return received{}
	}
	if i.storage != nil {
		return r
	}
	st, err := beneath.Stat(i.volumes, name+"/"+ImageFile)
	if beneath.IsNotExist(err) {
		st, err = beneath.Stat(i.volumes, name+"/"+DataDir)
	}
	if err != nil || st.Mtim.Nano() != r.Modified {
		return received{}
	}
	return r
}

// useUnchanged calls a function with the name of a volume that still has a received content. The volume is locked meanwhile.
// ErrUnavailable if no volume has it, ErrPending if another call holds the lock.
func (p *Pool) useUnchanged(ctx context.Context, lineage volume.ID, identity string, use func(name string) error) error {
	names, err := beneath.Names(p.volumes, ".")
	if err != nil {
		return err
	}
	has := func(name string) bool {
		r := p.Images.receivedContent(name)
		return r.Lineage == lineage && r.Identity == identity
	}
	for _, name := range names {
		if !has(name) {
			continue
		}
		lock, err := p.LockVolume(ctx, name)
		if err != nil {
			return err
		}
		if has(name) {
			return errors.Join(use(name), lock.Close())
		}
		_ = lock.Close()
	}
	return volume.Errorf(volume.ErrUnavailable, "the content %q, from which this transfer receives the differences, was changed or deleted: retry; the transfer begins again", identity)
}
