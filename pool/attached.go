package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/internal/crashpoint"
	"github.com/trivet-csi/trivet/volume"
)

const (
	attachedDir = "attached"
	// attachedFile is one fixed name: a volume of a node-local pool is
	// published to one node at most, and the link that makes the file is what
	// decides between two callers.
	attachedFile = attachedDir + "/node"

	attachmentVersion = 1
)

// Attachment says where a volume is controller-published.
type Attachment struct {
	Version  int    `json:"version"`
	Node     string `json:"node"`
	ReadOnly bool   `json:"readonly,omitempty"`
}

// Attach records that the volume is controller-published. ErrIncompatible if
// it is so at the same node otherwise, ErrPrecondition if at another node.
func (p *Pool) Attach(name string, want Attachment) error {
	if err := p.Check(); err != nil {
		return err
	}
	have, err := p.Attached(name)
	if err == nil {
		return errors.Join(want.compare(have, name), p.SettleVolume(name))
	}
	if !isNotExist(err) {
		return err
	}
	if err := p.removeEmptyAttachment(name); err != nil {
		return err
	}
	want.Version = attachmentVersion
	return p.linkAttachment(name, want)
}

func (a Attachment) compare(have Attachment, name string) error {
	switch {
	case have.Node != a.Node:
		return volume.Errorf(volume.ErrPrecondition, "volume %q is published to node %q: unpublish it there first", name, have.Node)
	case have.ReadOnly != a.ReadOnly:
		return volume.Errorf(volume.ErrIncompatible, "volume %q is published to node %q with readonly %t, asked for is %t: unpublish it first", name, have.Node, have.ReadOnly, a.ReadOnly)
	}
	return nil
}

func (p *Pool) removeEmptyAttachment(name string) error {
	if st, err := statBeneath(p.volumes, name+"/"+attachedFile); err == nil && st.Size == 0 {
		return p.root.Remove(volumePath(name, attachedFile))
	}
	return nil
}

func (p *Pool) linkAttachment(name string, a Attachment) error {
	b, err := json.Marshal(a)
	if err != nil {
		return err
	}
	tmp := tmpDir + "/" + name + ".attach"
	if err := p.root.WriteFile(tmp, b, 0o600); err != nil {
		return err
	}
	defer func() { _ = p.root.Remove(tmp) }()
	crashpoint.Here(crashpoint.AttachWritten)
	if err := p.root.Link(tmp, volumePath(name, attachedFile)); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.AttachLinked)
	p.countAttached(1)
	dir, err := p.root.OpenRoot(volumePath(name, attachedDir))
	if err != nil {
		return err
	}
	defer dir.Close()
	return syncAll(dir, "node", ".")
}

// Attached reads where the volume is controller-published; fs.ErrNotExist if
// nowhere. An empty record is of a call that lost its power before it answered.
func (p *Pool) Attached(name string) (Attachment, error) {
	b, err := readBeneath(p.volumes, name+"/"+attachedFile)
	if isNotExist(err) || (err == nil && len(b) == 0) {
		return Attachment{}, fs.ErrNotExist
	}
	if err != nil {
		return Attachment{}, err
	}
	var a Attachment
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	err = d.Decode(&a)
	if err == nil && a.Version != attachmentVersion {
		err = fmt.Errorf("version %d, this driver reads version %d", a.Version, attachmentVersion)
	}
	if err != nil {
		return Attachment{}, volume.Errorf(volume.ErrDamaged, "volume %q in pool %q: %s: %w", name, p.cfg.Name, attachedFile, err)
	}
	return a, nil
}

func (p *Pool) countAttached(n int) {
	p.ledger.mu.Lock()
	defer p.ledger.mu.Unlock()
	p.ledger.attached += n
}

func (p *Pool) isAttached(name string) bool {
	st, err := statBeneath(p.volumes, name+"/"+attachedFile)
	return err == nil && st.Size > 0
}

// Detach takes the record back that the volume is controller-published to
// node; an empty node means any. It is no error if there is none.
func (p *Pool) Detach(name, node string) error {
	have, err := p.Attached(name)
	if isNotExist(err) || (err == nil && node != "" && have.Node != node) {
		err := p.SettleVolume(name)
		if isNotExist(err) { // nor is the volume
			return nil
		}
		return err
	}
	if err != nil {
		return err
	}
	if err := p.Check(); err != nil {
		return err
	}
	if err := p.root.Remove(volumePath(name, attachedFile)); err != nil {
		return err
	}
	crashpoint.Here(crashpoint.DetachRemoved)
	p.countAttached(-1)
	return atomicfile.Sync(p.root, volumePath(name, attachedDir))
}
