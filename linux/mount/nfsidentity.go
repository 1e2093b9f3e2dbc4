package mount

import (
	"errors"
	"io/fs"
	"os"
	"strings"
)

// The files with the identifier of the NFS client. The identifier of the module applies if the network namespace has
// none (kernel documentation, admin-guide/kernel-parameters.txt, nfs.nfs4_unique_id).
const (
	netIdentifier    = "/sys/fs/nfs/net/nfs_client/identifier"
	moduleIdentifier = "/sys/module/nfs/parameters/nfs4_unique_id"
)

// ClientIdentity returns the name by which NFS 4 servers distinguish this node from others
// (Linux, fs/nfs/nfs4proc.c, nfs4_init_uniform_client_string).
func ClientIdentity() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", err
	}
	for _, path := range []string{netIdentifier, moduleIdentifier} {
		id, err := readIdentifier(path)
		if err != nil {
			return "", err
		}
		if id != "" {
			return id + "/" + host, nil
		}
	}
	return host, nil
}

// readIdentifier reads an identifier. It is empty if it is not set, or if the kernel does not have the file.
func readIdentifier(path string) (string, error) {
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if s := strings.TrimSpace(string(b)); s != "(null)" {
		return s, err
	}
	return "", err
}
