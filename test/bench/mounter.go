package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"github.com/trivet-csi/trivet/test/measure"
)

// mounter is a gRPC server that creates directories on an export and mounts the export for each
// call, as some drivers do. It validates nothing and writes no records. A volume's ID is its name.
type mounter struct {
	ready
	share string
	dir   string // for the mount points
	// processes makes the mounter start mount(8), which starts mount.nfs(8), and umount(8) for each
	// call. Otherwise it makes the system calls itself.
	processes bool
}

// serveMounter runs a mounter until ctx ends.
func serveMounter(ctx context.Context, args []string) error {
	m := &mounter{}
	flags := flag.NewFlagSet("bench mounter", flag.ContinueOnError)
	socket := flags.String("socket", "", "`path` of the socket")
	flags.StringVar(&m.share, "share", "", "`export` on the server at 127.0.0.1")
	flags.StringVar(&m.dir, "dir", "", "`directory` of the mount points")
	flags.BoolVar(&m.processes, "processes", false, "start mount(8) and umount(8) instead of calling mount(2) and umount2(2)")
	if err := flags.Parse(args); err != nil {
		return err
	}
	return serve(ctx, *socket, m)
}

// CreateVolume implements csi.ControllerServer.
func (m *mounter) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	err := m.mounted(ctx, req.GetName(), func(root string) error {
		path := filepath.Join(root, req.GetName())
		if err := unix.Mkdir(path, 0o777); err != nil {
			return err
		}
		return unix.Chmod(path, 0o777) // Mkdir applied the umask
	})
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: &csi.Volume{VolumeId: req.GetName(), CapacityBytes: req.GetCapacityRange().GetRequiredBytes()}}, nil
}

// DeleteVolume implements csi.ControllerServer.
func (m *mounter) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	err := m.mounted(ctx, req.GetVolumeId(), func(root string) error {
		return unix.Rmdir(filepath.Join(root, req.GetVolumeId()))
	})
	if err != nil {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// mounted runs f while the export is mounted in a new directory, which it passes as root.
func (m *mounter) mounted(ctx context.Context, name string, f func(root string) error) error {
	at := filepath.Join(m.dir, name)
	if err := os.Mkdir(at, 0o700); err != nil {
		return err
	}
	if err := m.mount(ctx, at); err != nil {
		return errors.Join(err, os.Remove(at))
	}
	return errors.Join(f(at), m.unmount(ctx, at), os.Remove(at))
}

func (m *mounter) mount(ctx context.Context, at string) error {
	if m.processes {
		return measure.Command(ctx, "mount", "-t", "nfs", "-o", "vers=4.2", nfsServer+":"+m.share, at)
	}
	if err := unix.Mount(nfsServer+":"+m.share, at, "nfs", 0, "vers=4.2,addr="+nfsServer+",clientaddr="+nfsServer); err != nil {
		return fmt.Errorf("mount %s: %w", at, err)
	}
	return nil
}

func (m *mounter) unmount(ctx context.Context, at string) error {
	if m.processes {
		return measure.Command(ctx, "umount", at)
	}
	return unmount(at)
}
