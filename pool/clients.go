package pool

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/volume"
)

// clientsDir has a file for each NFS client that nodes of the pool are: its
// server takes two nodes with the same identity for one, and gives both the lock
// on an image.
const clientsDir = ".trivet/clients"

// client is such a file.
type client struct {
	Client string `json:"client"`
	Node   string `json:"node"`
}

// FolderPath is where the folder of a volume is, below the pool.
func (p *Pool) FolderPath(name string) string { return volumeDir(name) }

// Register records which node the NFS client with an identity is, in a shared
// pool. ErrPrecondition if it is another node.
func (p *Pool) Register(identity, node string) error {
	path := clientPath(identity)
	have, err := p.readClient(path)
	if isNotExist(err) {
		have, err = p.linkClient(path, client{Client: identity, Node: node})
	}
	if err != nil {
		return err
	}
	if have.Node != node {
		return volume.Errorf(volume.ErrPrecondition, "pool %q: node %q has the same NFS client identity (%s) as node %q, and the server would give both the lock on one image: set a unique one in /sys/fs/nfs/net/nfs_client/identifier, or as the module parameter nfs.nfs4_unique_id, before anything is mounted; if there is no node %[4]q any more, remove %[5]s from the export",
			p.cfg.Name, node, identity, have.Node, path)
	}
	return nil
}

// Registered tells which node the NFS client with an identity is; empty: none yet.
func (p *Pool) Registered(identity string) (node string, err error) {
	c, err := p.readClient(clientPath(identity))
	if isNotExist(err) {
		return "", nil
	}
	return c.Node, err
}

func clientPath(identity string) string {
	sum := sha256.Sum256([]byte(identity))
	return clientsDir + "/" + hex.EncodeToString(sum[:16])
}

func (p *Pool) readClient(path string) (c client, err error) {
	b, err := p.readBeneath(p.dir, path)
	if err != nil {
		return c, p.strange(path, err)
	}
	if err := json.Unmarshal(b, &c); err != nil || c.Node == "" {
		return c, volume.Errorf(volume.ErrPrecondition, "pool %q: %s is not what a driver wrote there (%w): remove it", p.cfg.Name, path, errors.Join(err))
	}
	return c, nil
}

// linkClient makes the file if there is none, and returns what it then has: a
// link whose reply was lost is found made.
func (p *Pool) linkClient(path string, c client) (client, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return c, err
	}
	if err := p.root.Mkdir(clientsDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return c, err
	}
	tmp := path + "." + rand.Text()
	if err := p.root.WriteFile(tmp, b, 0o600); err != nil {
		return c, err
	}
	defer func() { _ = p.root.Remove(tmp) }()
	if err := atomicfile.Sync(p.root, tmp); err != nil {
		return c, err
	}
	if err := p.root.Link(tmp, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return c, err
	}
	if err := atomicfile.Sync(p.root, clientsDir); err != nil {
		return c, err
	}
	return p.readClient(path)
}
