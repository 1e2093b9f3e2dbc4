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

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
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

// Attach records that the volume is controller-published. ErrIncompatible if
// it is so at the same node otherwise, ErrPrecondition if at another node, unless
// both are MultiNode. ErrNotFound or ErrPending if it was deleted or unpublished
// meanwhile.
func (p *Pool) Attach(name string, want Attachment) error {
	if err := p.Check(); err != nil {
		return err
	}
	have, err := p.attachment(name, want.file())
	if err == nil {
		err := errors.Join(want.compare(have, name), p.SettleVolume(name))
		if err != nil {
			return err
		}
		return p.alone(name, want)
	}
	if !isNotExist(err) {
		return err
	}
	if err := p.removeEmptyAttachment(name, want.file()); err != nil {
		return err
	}
	want.Version = attachmentVersion
	if err := p.linkAttachment(name, want); err != nil {
		return err
	}
	// Another process may have made one of the other kind at the same time. Both see
	// that, and none of them stays.
	if err := p.alone(name, want); err != nil {
		return errors.Join(err, p.removeAttachment(name, want.file()))
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

// alone refuses what other attachments of the volume do not allow beside them, and
// one that is gone again, with the volume perhaps. Only a shared pool has more than
// one.
func (p *Pool) alone(name string, want Attachment) error {
	if !p.Shared() {
		return nil
	}
	all, err := p.Attachments(name)
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
		return p.vanished(name)
	}
	return nil
}

// vanished says why an attachment that was just made is not there.
func (p *Pool) vanished(name string) error {
	if _, err := p.Lookup(name); err != nil {
		return err
	}
	return volume.Errorf(volume.ErrPending, "volume %q in pool %q was unpublished meanwhile: try again", name, p.cfg.Name)
}

func (p *Pool) removeEmptyAttachment(name, file string) error {
	if st, err := statBeneath(p.volumes, attachedPath(name, file)); err == nil && st.Size == 0 {
		return p.removeAttachment(name, file)
	}
	return nil
}

func (p *Pool) linkAttachment(name string, a Attachment) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	tmp, err := p.tmpName(name, a.file())
	if err != nil {
		return err
	}
	tmp += attachSuffix
	if err := p.writeTmp(tmp, b); err != nil {
		return p.explain(err)
	}
	defer func() { _ = unix.Unlinkat(int(p.tmp.Fd()), tmp, 0) }()
	crashpoint.Here(crashpoint.AttachWritten)
	dir, err := p.attachedFolder(name)
	if err != nil {
		return p.explain(err)
	}
	defer dir.Close()
	if err := unix.Linkat(int(p.tmp.Fd()), tmp, int(dir.Fd()), a.file(), 0); err != nil {
		return p.linkedAnyway(name, a, err)
	}
	crashpoint.Here(crashpoint.AttachLinked)
	if p.Shared() { // NFS makes names durable before it answers
		return nil
	}
	p.noteAttached(name, true)
	return syncBeneath(dir, a.file())
}

// attachedFolder opens a volume's folder of attachments. In a shared pool the first
// makes it.
func (p *Pool) attachedFolder(name string) (*os.File, error) {
	dir, err := openDirBeneath(p.volumes, name+"/"+attachedDir)
	if !p.Shared() || !errors.Is(err, unix.ENOENT) {
		return dir, err
	}
	folder, err := openDirBeneath(p.volumes, name)
	if err != nil {
		return nil, err
	}
	defer folder.Close()
	return openOrMake(folder, attachedDir, 0o700)
}

// writeTmp writes a small file in tmp. In a shared pool it is durable, so that none
// is linked that is not.
func (p *Pool) writeTmp(name string, b []byte) error {
	f, err := p.openRegular(p.tmp, name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	if err == nil && p.Shared() {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// syncBeneath makes a file durable, and the names beside it (see syncAll).
func syncBeneath(dir *os.File, name string) error {
	f, err := openBeneath(dir, name, unix.OpenHow{Flags: unix.O_RDONLY | unix.O_CLOEXEC, Resolve: unix.RESOLVE_BENEATH | unix.RESOLVE_NO_SYMLINKS})
	if err != nil {
		return err
	}
	defer f.Close()
	return errors.Join(f.Sync(), dir.Sync())
}

// linkedAnyway is for a link that failed: the reply may have been lost, or another
// process was asked the same, and may have taken its own back since.
func (p *Pool) linkedAnyway(name string, want Attachment, failed error) error {
	have, err := p.attachment(name, want.file())
	if isNotExist(err) && errors.Is(failed, unix.EEXIST) {
		return p.vanished(name)
	}
	if err != nil {
		return p.explain(fmt.Errorf("recording that volume %q in pool %q is published: %w", name, p.cfg.Name, failed))
	}
	return want.compare(have, name)
}

// Attachments lists where a volume is controller-published.
func (p *Pool) Attachments(name string) ([]Attachment, error) {
	files, err := p.attachedFiles(name)
	if err != nil {
		return nil, err
	}
	var all []Attachment
	for _, file := range files {
		a, err := p.attachment(name, file)
		if isNotExist(err) {
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
func (p *Pool) Unpublished(id volume.ID) error {
	at, err := p.Attachments(id.Name)
	if err == nil && len(at) > 0 {
		err = volume.Errorf(volume.ErrPrecondition, "volume %s is published to node %q: unpublish it first", id, at[0].Node)
	}
	return err
}

// attachedFiles are the names of a volume's attachments; none if it is not there.
func (p *Pool) attachedFiles(name string) ([]string, error) {
	if !p.Shared() {
		return []string{singleFile}, nil
	}
	dir, err := openDirBeneath(p.volumes, name+"/"+attachedDir)
	if isNotExist(err) {
		return nil, nil
	}
	if errors.Is(err, unix.ELOOP) {
		return nil, p.damagedAttachment(name, "", err)
	}
	if err != nil {
		return nil, p.explain(err)
	}
	defer dir.Close()
	names, err := dir.Readdirnames(-1)
	var files []string
	for _, n := range names {
		if n == singleFile || strings.HasPrefix(n, singleFile+".") {
			files = append(files, n)
		}
	}
	return files, p.explain(err)
}

// attachment reads one. An empty record is of a call that lost its power before it
// answered.
func (p *Pool) attachment(name, file string) (Attachment, error) {
	b, err := p.readBeneath(p.volumes, attachedPath(name, file))
	if isNotExist(err) || (err == nil && len(b) == 0) {
		return Attachment{}, fs.ErrNotExist
	}
	if err != nil && p.saysNothing(err) {
		return Attachment{}, p.unreadable(err)
	}
	if err != nil {
		return Attachment{}, p.damagedAttachment(name, file, err)
	}
	a, err := parseAttachment(b)
	a.MultiNode = file != singleFile
	if err == nil && a.file() != file {
		err = fmt.Errorf("it is of node %q, whose file has another name", a.Node)
	}
	if err != nil {
		return Attachment{}, p.damagedAttachment(name, file, err)
	}
	return a, nil
}

func (p *Pool) damagedAttachment(name, file string, err error) error {
	return volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s/%s: %w: if no node uses the volume, remove that", name, p.cfg.Name, attachedDir, file, err)
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

func (p *Pool) noteAttached(name string, attached bool) {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	if attached {
		p.ledger.attached[volumeDir(name)] = true
	} else {
		delete(p.ledger.attached, volumeDir(name))
	}
}

func (p *Pool) isAttached(name string) bool {
	st, err := statBeneath(p.volumes, attachedPath(name, singleFile))
	return err == nil && st.Size > 0
}

// Detach takes the record back that the volume is controller-published to
// node; an empty node means any. It is no error if there is none.
func (p *Pool) Detach(name, node string) error {
	files, err := p.attachedFiles(name)
	if err != nil {
		return err
	}
	found := false
	for _, file := range files {
		of, err := p.isOf(name, file, node)
		if err != nil {
			return err
		}
		if !of {
			continue
		}
		found = true
		if err := p.detach(name, file); err != nil {
			return err
		}
	}
	if found {
		return nil
	}
	if err := p.SettleVolume(name); !isNotExist(err) {
		return err
	}
	return nil // nor is the volume
}

// isOf tells whether an attachment is of a node; an empty node means any.
func (p *Pool) isOf(name, file, node string) (bool, error) {
	if file == (Attachment{Node: node, MultiNode: true}).file() { // whatever is in it
		return true, nil
	}
	if file != singleFile && node != "" {
		return false, nil
	}
	have, err := p.attachment(name, file)
	if isNotExist(err) {
		return false, nil
	}
	return err == nil && (node == "" || have.Node == node), err
}

func (p *Pool) detach(name, file string) error {
	if err := p.Check(); err != nil {
		return err
	}
	if err := p.removeAttachment(name, file); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DetachRemoved)
	if p.Shared() {
		return nil
	}
	p.noteAttached(name, false)
	return atomicfile.Sync(p.root, volumePath(name, attachedDir))
}

func (p *Pool) removeAttachment(name, file string) error {
	dir, err := openDirBeneath(p.volumes, name+"/"+attachedDir)
	if err == nil {
		defer dir.Close()
		err = unix.Unlinkat(int(dir.Fd()), file, 0)
	}
	if p.Shared() && isGone(err) { // by another process, or the reply was lost
		return nil
	}
	if err != nil {
		return fmt.Errorf("volume %q in pool %q: removing %s/%s: %w", name, p.cfg.Name, attachedDir, file, err)
	}
	return nil
}
