package pool

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

const (
	attachedDir = "attached"
	// singleFile is the name of the attachment of a volume that may be published to only one node.
	// All nodes use this name, so only one of two concurrent calls of link(2) succeeds.
	singleFile = "node"

	attachmentVersion = 1
)

// Attachment is the record that a volume is controller-published to a node.
type Attachment struct {
	Version  int    `json:"version"`
	Node     string `json:"node"`
	ReadOnly bool   `json:"readOnly,omitempty"`
	// MultiNode means that the volume may be published to other nodes too. The name of the file tells
	// it, so the record does not contain it.
	MultiNode bool `json:"-"`
}

// file is the name of the attachment's file.
func (a Attachment) file() string {
	if !a.MultiNode {
		return singleFile
	}
	sum := sha256.Sum256([]byte(a.Node))
	return singleFile + "." + hex.EncodeToString(sum[:])[:16]
}

// attachedPath is the path of an attachment below the pool's folder of volumes.
func attachedPath(name, file string) string { return name + "/" + attachedDir + "/" + file }

// Attachments records where the volumes of a pool are controller-published.
type Attachments struct{ *store }

// Attach records that the volume is controller-published. ErrIncompatible if it is published to
// the same node with another access mode or readonly flag. ErrPrecondition if it is published to
// another node, unless both attachments are MultiNode. ErrNotFound if the volume was deleted
// meanwhile, ErrPending if it was unpublished meanwhile.
func (at *Attachments) Attach(name string, requested Attachment) error {
	if err := at.Check(); err != nil {
		return err
	}
	existing, err := at.attachment(name, requested.file())
	if err == nil {
		if err := errors.Join(requested.compare(existing, name), at.SyncVolume(name)); err != nil {
			return err
		}
		return at.checkOthers(name, requested)
	}
	if !beneath.IsNotExist(err) {
		return err
	}
	// An empty file counts as missing, but link(2) would fail.
	if st, err := beneath.Stat(at.volumes, attachedPath(name, requested.file())); err == nil && st.Size == 0 {
		if err := at.removeAttachment(name, requested.file()); err != nil {
			return err
		}
	}
	requested.Version = attachmentVersion
	if err := at.linkAttachment(name, requested); err != nil {
		return err
	}
	// Another process may have made an incompatible attachment at the same time. Then both
	// processes remove their own.
	if err := at.checkOthers(name, requested); err != nil {
		return errors.Join(err, at.removeAttachment(name, requested.file()))
	}
	return nil
}

// compare returns nil if the requested attachment a of the volume name is the same as the existing one.
// Otherwise it returns the reason to refuse a (ErrPrecondition, ErrIncompatible).
func (a Attachment) compare(existing Attachment, name string) error {
	switch {
	case existing.Node != a.Node:
		return volume.Errorf(volume.ErrPrecondition, "volume %q is published to node %q: unpublish it there first", name, existing.Node)
	case existing.ReadOnly != a.ReadOnly:
		return volume.Errorf(volume.ErrIncompatible, "volume %q is published to node %q with readonly %t, the request has %t: unpublish it first", name, existing.Node, existing.ReadOnly, a.ReadOnly)
	case existing.MultiNode != a.MultiNode:
		return volume.Errorf(volume.ErrIncompatible, "volume %q is published to node %q with another access mode: unpublish it first", name, existing.Node)
	}
	return nil
}

// checkOthers refuses an attachment that is not compatible with the volume's other attachments. It
// also fails if another process has removed the requested attachment. Only in a shared pool can a volume
// have several attachments.
func (at *Attachments) checkOthers(name string, requested Attachment) error {
	if at.medium.SoleWriter() {
		return nil
	}
	all, err := at.List(name)
	if err != nil {
		return err
	}
	found := false
	for _, existing := range all {
		if existing.MultiNode && requested.MultiNode && existing.Node != requested.Node {
			continue
		}
		if err := requested.compare(existing, name); err != nil {
			return err
		}
		found = true
	}
	if !found {
		return at.removedMeanwhile(name)
	}
	return nil
}

// removedMeanwhile returns the error for an attachment that was just made and does not exist.
func (at *Attachments) removedMeanwhile(name string) error {
	if _, err := at.Lookup(name); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrPending, "volume %q in pool %q was unpublished meanwhile: retry", name, at.cfg.Name)
}

// linkAttachment writes an attachment to tmp, and then links it to its name.
func (at *Attachments) linkAttachment(name string, a Attachment) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	entry, err := at.medium.Entry(name, 0, "."+a.file()+".attach")
	if err != nil {
		return err
	}
	file, err := at.files.Open(at.tmp, entry, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return at.medium.Explain(err)
	}
	defer func() { _ = unix.Unlinkat(int(at.tmp.Fd()), entry, 0) }()
	defer file.Close() // before Unlinkat: NFS renames an open file instead of removing it
	if _, err := file.Write(b); err != nil {
		return at.medium.Explain(err)
	}
	crashpoint.Here(crashpoint.AttachWritten)
	dir, err := at.attachedFolder(name)
	if err != nil {
		return at.medium.Explain(err)
	}
	defer dir.Close()
	return at.medium.Link(file, dir, func() error {
		if err := unix.Linkat(int(at.tmp.Fd()), entry, int(dir.Fd()), a.file(), 0); err != nil {
			return at.checkFailedLink(name, a, err)
		}
		crashpoint.Here(crashpoint.AttachLinked)
		at.ledger.SetAttached(FolderPath(name), true)
		return nil
	})
}

// attachedFolder opens a volume's folder of attachments. It makes a missing one, because a backup may
// have left out empty folders.
func (at *Attachments) attachedFolder(name string) (*os.File, error) {
	dir, err := beneath.OpenDir(at.volumes, name+"/"+attachedDir)
	if !errors.Is(err, unix.ENOENT) {
		return dir, err
	}
	folder, err := beneath.OpenDir(at.volumes, name)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	if dir, err = openOrMake(folder, attachedDir, 0o700); err != nil {
		return nil, err
	}
	if err := at.medium.SyncNames(folder); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// checkFailedLink checks whether the attachment exists although link(2) failed, because the reply was
// lost, or because another process has made it. The other process may have removed it again.
func (at *Attachments) checkFailedLink(name string, requested Attachment, failed error) error {
	existing, err := at.attachment(name, requested.file())
	if beneath.IsNotExist(err) && errors.Is(failed, unix.EEXIST) {
		return at.removedMeanwhile(name)
	}
	if err != nil {
		return at.medium.Explain(fmt.Errorf("recording that volume %q in pool %q is published: %w", name, at.cfg.Name, failed))
	}
	return requested.compare(existing, name)
}

// List returns the attachments of a volume.
func (at *Attachments) List(name string) ([]Attachment, error) {
	files, err := at.attachedFiles(name)
	if err != nil {
		return nil, err
	}
	var all []Attachment
	for _, file := range files {
		a, err := at.attachment(name, file)
		if beneath.IsNotExist(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return all, nil
}

// CheckUnpublished refuses a volume that is controller-published (ErrPrecondition).
func (at *Attachments) CheckUnpublished(id volume.ID) error {
	all, err := at.List(id.Name)
	if err == nil && len(all) > 0 {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q: unpublish it first", id, all[0].Node)
	}
	return err
}

// attachedFiles returns the file names that the attachments of a volume may have. In a shared pool
// these are the files that exist.
func (at *Attachments) attachedFiles(name string) ([]string, error) {
	if at.medium.SoleWriter() {
		return []string{singleFile}, nil
	}
	dir, err := beneath.OpenDir(at.volumes, name+"/"+attachedDir)
	if beneath.IsNotExist(err) {
		return nil, nil
	}
	if errors.Is(err, unix.ELOOP) {
		return nil, at.damagedAttachment(name, "", err)
	}
	if err != nil {
		return nil, at.medium.Explain(err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	files := slices.DeleteFunc(names, func(n string) bool { return n != singleFile && !strings.HasPrefix(n, singleFile+".") })
	return files, at.medium.Explain(err)
}

// attachment reads one attachment. An empty file counts as missing, because it is what a power
// failure leaves of an attachment whose call has not answered.
func (at *Attachments) attachment(name, file string) (Attachment, error) {
	b, err := at.files.Read(at.volumes, attachedPath(name, file))
	if beneath.IsNotExist(err) || (err == nil && len(b) == 0) {
		return Attachment{}, fs.ErrNotExist
	}
	if err != nil && at.inconclusive(err) {
		return Attachment{}, at.medium.Unreadable(err)
	}
	if err != nil {
		return Attachment{}, at.damagedAttachment(name, file, err)
	}
	a, err := parseAttachment(b)
	a.MultiNode = file != singleFile
	if err == nil && a.file() != file {
		err = fmt.Errorf("the file contains node %q, but its name is that of another node's attachment", a.Node)
	}
	if err != nil {
		return Attachment{}, at.damagedAttachment(name, file, err)
	}
	return a, nil
}

func (at *Attachments) damagedAttachment(name, file string, err error) error {
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s/%s: %w: if no node uses the volume, remove that file", name, at.cfg.Name, attachedDir, file, err)
}

// parseAttachment parses the content of an attachment's file.
func parseAttachment(b []byte) (a Attachment, err error) {
	err = volume.DecodeRecord(b, &a, &a.Version, attachmentVersion)
	if err == nil && a.Node == "" {
		err = errors.New("the node is missing")
	}
	return a, err
}

// Detach removes the volume's attachment to a node, or all its attachments if node is empty. It
// succeeds if there is none.
func (at *Attachments) Detach(name, node string) error {
	files, err := at.attachedFiles(name)
	if err != nil {
		return err
	}
	found := false
	for _, file := range files {
		belongs, err := at.belongsTo(name, file, node)
		if err == nil && belongs {
			found = true
			err = at.Check()
		}
		if err == nil && belongs {
			err = at.removeAttachment(name, file)
		}
		if err != nil {
			return err
		}
	}
	if found {
		return nil
	}
	// An earlier call may have removed the attachment without a sync.
	if err := at.SyncVolume(name); !beneath.IsNotExist(err) {
		return err
	}
	return nil // the volume does not exist
}

// belongsTo tells whether an attachment is for a node. An empty node stands for all nodes.
func (at *Attachments) belongsTo(name, file, node string) (bool, error) {
	if file == (Attachment{Node: node, MultiNode: true}).file() { // the name identifies the node
		return true, nil
	}
	if file != singleFile && node != "" {
		return false, nil
	}
	existing, err := at.attachment(name, file)
	if beneath.IsNotExist(err) {
		return false, nil
	}
	return err == nil && (node == "" || existing.Node == node), err
}

// removeAttachment removes an attachment, if it exists. The removal is durable.
func (at *Attachments) removeAttachment(name, file string) error {
	dir, err := beneath.OpenDir(at.volumes, name+"/"+attachedDir)
	if err == nil {
		defer dir.Close()
		err = unix.Unlinkat(int(dir.Fd()), file, 0)
	}
	if err := beneath.IgnoreGone(err); err != nil {
		return fmt.Errorf("volume %q in pool %q: removing %s/%s: %w", name, at.cfg.Name, attachedDir, file, err)
	}
	crashpoint.Here(crashpoint.DetachRemoved)
	at.ledger.SetAttached(FolderPath(name), false)
	if dir == nil { // the folder of attachments does not exist
		return nil
	}
	return at.medium.SyncNames(dir)
}

// count records the controller-published volumes in the ledger, if the ledger counts them.
func (at *Attachments) count() error {
	if !at.ledger.CountsAttached() {
		return nil
	}
	names, err := beneath.Names(at.volumes, ".")
	for _, name := range names {
		if st, err := beneath.Stat(at.volumes, attachedPath(name, singleFile)); err == nil && st.Size > 0 {
			at.ledger.SetAttached(FolderPath(name), true)
		}
	}
	return err
}
