package pool

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

const (
	attachedDir = "attached"
	// singleFile is one fixed name: a volume is published to one node at most, and
	// the link that makes the file is what decides between two callers.
	singleFile = "node"

	attachmentVersion = 1
)

// Attachment says where a volume is controller-published.
type Attachment struct {
	Version  int    `json:"version"`
	Node     string `json:"node"`
	ReadOnly bool   `json:"readonly,omitempty"`
	// MultiNode: others may be published beside it. The file's name says so.
	MultiNode bool `json:"-"`
}

// file is the attachment's name in the volume's folder of them.
func (a Attachment) file() string {
	if !a.MultiNode {
		return singleFile
	}
	sum := sha256.Sum256([]byte(a.Node))
	return singleFile + "." + hex.EncodeToString(sum[:])[:16]
}

// attachedPath is the path of an attachment, below the volumes.
func attachedPath(name, file string) string { return name + "/" + attachedDir + "/" + file }

// Attachments records where the volumes of a pool are controller-published.
type Attachments struct{ *store }

// Attach records that the volume is controller-published. ErrIncompatible if
// it is so at the same node otherwise, ErrPrecondition if at another node, unless
// both are MultiNode. ErrNotFound or ErrPending if it was deleted or unpublished
// meanwhile.
func (at *Attachments) Attach(name string, want Attachment) error {
	if err := at.Check(); err != nil {
		return err
	}
	have, err := at.attachment(name, want.file())
	if err == nil {
		err := errors.Join(want.compare(have, name), at.SyncVolume(name))
		if err != nil {
			return err
		}
		return at.checkOthers(name, want)
	}
	if !beneath.IsNotExist(err) {
		return err
	}
	if err := at.removeEmptyAttachment(name, want.file()); err != nil {
		return err
	}
	want.Version = attachmentVersion
	if err := at.linkAttachment(name, want); err != nil {
		return err
	}
	// Another process may have made one of the other kind at the same time. Both see
	// that, and none of them stays.
	if err := at.checkOthers(name, want); err != nil {
		return errors.Join(err, at.removeAttachment(name, want.file()))
	}
	return nil
}

func (a Attachment) compare(have Attachment, name string) error {
	switch {
	case have.Node != a.Node:
		return volume.Errorf(volume.ErrPrecondition, "volume %q is published to node %q: unpublish it there first", name, have.Node)
	case have.ReadOnly != a.ReadOnly:
		return volume.Errorf(volume.ErrIncompatible, "volume %q is published to node %q with readonly %t, asked for is %t: unpublish it first", name, have.Node, have.ReadOnly, a.ReadOnly)
	case have.MultiNode != a.MultiNode:
		return volume.Errorf(volume.ErrIncompatible, "volume %q is published to node %q with another access mode: unpublish it first", name, have.Node)
	}
	return nil
}

// checkOthers refuses what other attachments of the volume do not allow beside them, and
// one that is gone again, with the volume perhaps. Only a shared pool has more than
// one.
func (at *Attachments) checkOthers(name string, want Attachment) error {
	all, err := at.List(name)
	if err != nil {
		return err
	}
	there := false
	for _, have := range all {
		if have.MultiNode && want.MultiNode && have.Node != want.Node {
			continue
		}
		if err := want.compare(have, name); err != nil {
			return err
		}
		there = true
	}
	if !there {
		return at.vanished(name)
	}
	return nil
}

// vanished says why an attachment that was just made is not there.
func (at *Attachments) vanished(name string) error {
	if _, err := at.Lookup(name); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrPending, "volume %q in pool %q was unpublished meanwhile: try again", name, at.cfg.Name)
}

func (at *Attachments) removeEmptyAttachment(name, file string) error {
	if st, err := beneath.Stat(at.volumes, attachedPath(name, file)); err == nil && st.Size == 0 {
		return at.removeAttachment(name, file)
	}
	return nil
}

func (at *Attachments) linkAttachment(name string, a Attachment) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	entry, err := at.medium.Entry(name, 0, "."+a.file()+".attach")
	if err != nil {
		return err
	}
	file, err := at.writeTmp(entry, b)
	if err != nil {
		return at.medium.Explain(err)
	}
	defer func() { _ = unix.Unlinkat(int(at.tmp.Fd()), entry, 0) }()
	defer file.Close() // first: NFS keeps a file under another name that is removed while it is open
	crashpoint.Here(crashpoint.AttachWritten)
	dir, err := at.attachedFolder(name)
	if err != nil {
		return at.medium.Explain(err)
	}
	defer dir.Close()
	return at.medium.Link(file, dir, func() error {
		if err := unix.Linkat(int(at.tmp.Fd()), entry, int(dir.Fd()), a.file(), 0); err != nil {
			return at.linkedAnyway(name, a, err)
		}
		crashpoint.Here(crashpoint.AttachLinked)
		at.ledger.SetAttached(volumeDir(name), true)
		return nil
	})
}

// attachedFolder opens a volume's folder of attachments. A volume need not have one: an
// earlier driver did not make it with each, and a backup may leave out empty folders.
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

// writeTmp writes a small file in tmp.
func (at *Attachments) writeTmp(entry string, b []byte) (*os.File, error) {
	f, err := at.files.Open(at.tmp, entry, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	if _, err := f.Write(b); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// linkedAnyway is for a link that failed: the reply may have been lost, or another
// process was asked the same, and may have taken its own back since.
func (at *Attachments) linkedAnyway(name string, want Attachment, failed error) error {
	have, err := at.attachment(name, want.file())
	if beneath.IsNotExist(err) && errors.Is(failed, unix.EEXIST) {
		return at.vanished(name)
	}
	if err != nil {
		return at.medium.Explain(fmt.Errorf("recording that volume %q in pool %q is published: %w", name, at.cfg.Name, failed))
	}
	return want.compare(have, name)
}

// List lists where a volume is controller-published.
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

// Unpublished refuses a volume that is controller-published (ErrPrecondition).
func (at *Attachments) Unpublished(id volume.ID) error {
	all, err := at.List(id.Name)
	if err == nil && len(all) > 0 {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q: unpublish it first", id, all[0].Node)
	}
	return err
}

// attachedFiles are the names of a volume's attachments; none if it is not there.
func (at *Attachments) attachedFiles(name string) ([]string, error) {
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
	var files []string
	for _, n := range names {
		if n == singleFile || strings.HasPrefix(n, singleFile+".") {
			files = append(files, n)
		}
	}
	return files, at.medium.Explain(err)
}

// attachment reads one. An empty record is of a call that lost its power before it
// answered.
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
		err = fmt.Errorf("it is of node %q, whose file has another name", a.Node)
	}
	if err != nil {
		return Attachment{}, at.damagedAttachment(name, file, err)
	}
	return a, nil
}

func (at *Attachments) damagedAttachment(name, file string, err error) error {
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s/%s: %w: if no node uses the volume, remove that", name, at.cfg.Name, attachedDir, file, err)
}

func parseAttachment(b []byte) (a Attachment, err error) {
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	switch err = d.Decode(&a); {
	case err != nil:
	case a.Version != attachmentVersion:
		err = fmt.Errorf("version %d, this driver reads version %d", a.Version, attachmentVersion)
	case a.Node == "":
		err = errors.New("it names no node")
	}
	return a, err
}

func (at *Attachments) isAttached(name string) bool {
	st, err := beneath.Stat(at.volumes, attachedPath(name, singleFile))
	return err == nil && st.Size > 0
}

// Detach takes the record back that the volume is controller-published to
// node; an empty node means any. It is no error if there is none.
func (at *Attachments) Detach(name, node string) error {
	files, err := at.attachedFiles(name)
	if err != nil {
		return err
	}
	found := false
	for _, file := range files {
		of, err := at.belongsTo(name, file, node)
		if err != nil {
			return err
		}
		if !of {
			continue
		}
		found = true
		if err := at.detach(name, file); err != nil {
			return err
		}
	}
	if found {
		return nil
	}
	if err := at.SyncVolume(name); !beneath.IsNotExist(err) {
		return err
	}
	return nil // nor is the volume
}

// belongsTo tells whether an attachment is of a node; an empty node means any.
func (at *Attachments) belongsTo(name, file, node string) (bool, error) {
	if file == (Attachment{Node: node, MultiNode: true}).file() { // whatever is in it
		return true, nil
	}
	if file != singleFile && node != "" {
		return false, nil
	}
	have, err := at.attachment(name, file)
	if beneath.IsNotExist(err) {
		return false, nil
	}
	return err == nil && (node == "" || have.Node == node), err
}

func (at *Attachments) detach(name, file string) error {
	if err := at.Check(); err != nil {
		return err
	}
	if err := at.removeAttachment(name, file); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DetachRemoved)
	at.ledger.SetAttached(volumeDir(name), false)
	dir, err := beneath.OpenDir(at.volumes, name+"/"+attachedDir)
	if err != nil {
		return beneath.IgnoreGone(err)
	}
	defer dir.Close()
	return at.medium.SyncNames(dir)
}

// removeAttachment removes an attachment, unless that was done already.
func (at *Attachments) removeAttachment(name, file string) error {
	dir, err := beneath.OpenDir(at.volumes, name+"/"+attachedDir)
	if err == nil {
		defer dir.Close()
		err = unix.Unlinkat(int(dir.Fd()), file, 0)
	}
	if err := beneath.IgnoreGone(err); err != nil {
		return fmt.Errorf("volume %q in pool %q: removing %s/%s: %w", name, at.cfg.Name, attachedDir, file, err)
	}
	return nil
}

// count sets in the ledger which volumes are controller-published, if it counts them.
func (at *Attachments) count() error {
	if !at.ledger.CountsAttached() {
		return nil
	}
	names, err := beneath.Names(at.volumes, ".")
	for _, name := range names {
		if at.isAttached(name) {
			at.ledger.SetAttached(volumeDir(name), true)
		}
	}
	return err
}
