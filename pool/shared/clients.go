package shared

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"

	"github.com/trivet-csi/trivet/internal/atomicfile"
	"github.com/trivet-csi/trivet/pool/beneath"
	"github.com/trivet-csi/trivet/volume"
)

// clientsDir has a file for each NFS client identity of the pool's nodes. The server takes two nodes
// with the same identity for one client, so both would get the lock of an image.
const (
	clientsDir    = ".trivet/clients"
	clientVersion = 1
)

// client is the content of a file in clientsDir.
type client struct {
	Version int    `json:"version"`
	Client  string `json:"client"`
	Node    string `json:"node"`
}

// Register records the node that has an NFS client identity. ErrPrecondition if another node
// has it.
func (e *Export) Register(identity, node string) error {
	path := clientPath(identity)
	have, err := e.readClient(path)
	if beneath.IsNotExist(err) {
		have, err = e.linkClient(path, client{Version: clientVersion, Client: identity, Node: node})
	}
	if err != nil {
		return err
	}
	if have.Node != node {
		return volume.Errorf(volume.ErrPrecondition, "pool %q: node %q has the same NFS client identity (%s) as node %q, and the server would give both the lock on one image: set a unique one in /sys/fs/nfs/net/nfs_client/identifier, or as the module parameter nfs.nfs4_unique_id, before anything is mounted; if node %[4]q no longer exists, remove %[5]s from the export",
			e.Name, node, identity, have.Node, path)
	}
	return nil
}

// Registered returns the node that has an NFS client identity; empty if no node has it yet.
func (e *Export) Registered(identity string) (node string, err error) {
	c, err := e.readClient(clientPath(identity))
	if beneath.IsNotExist(err) {
		return "", nil
	}
	return c.Node, err
}

func clientPath(identity string) string {
	sum := sha256.Sum256([]byte(identity))
	return clientsDir + "/" + hex.EncodeToString(sum[:16])
}

// readClient reads the file of a client. ErrPrecondition if no driver wrote it.
func (e *Export) readClient(path string) (c client, err error) {
	b, err := e.Files.Read(e.Dir, path)
	if err != nil {
		return c, e.foreign(path, err)
	}
	err = volume.DecodeRecord(b, &c, &c.Version, clientVersion)
	if err != nil && c.Version != 0 {
		return c, volume.Errorf(volume.ErrPrecondition, "pool %q: %s: %w", e.Name, path, err)
	}
	if err == nil && c.Node == "" {
		err = errors.New("it names no node")
	}
	if err != nil {
		return c, volume.Errorf(volume.ErrPrecondition, "pool %q: %s is not a file that a driver wrote (%w): remove it", e.Name, path, err)
	}
	return c, nil
}

// linkClient makes a client's file unless it exists, and returns its content. It reads the file back,
// because another node may have made it first.
func (e *Export) linkClient(path string, c client) (client, error) {
	b, err := json.Marshal(c)
	if err != nil {
		return c, err
	}
	if err := e.Root.Mkdir(clientsDir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return c, err
	}
	tmp := path + "." + rand.Text()
	defer func() { _ = e.Root.Remove(tmp) }()
	if err := atomicfile.Create(e.Root, tmp, b); err != nil {
		return c, err
	}
	if err := e.Root.Link(tmp, path); err != nil && !errors.Is(err, fs.ErrExist) {
		return c, err
	}
	if err := atomicfile.Sync(e.Root, clientsDir); err != nil {
		return c, err
	}
	return e.readClient(path)
}
