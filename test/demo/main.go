// Command demo runs a driver on a new filesystem, and creates, uses and deletes one volume with the
// CSI calls that Kubernetes makes. It prints what each call changes on this machine, and removes
// everything at the end. Run it as root, with `make demo`.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

func main() {
	binary := flag.String("binary", "bin/trivet", "the `file` of the driver to run")
	l := &life{}
	flag.StringVar(&l.backend, "backend", "loop", "the `kind` of the volume")
	flag.StringVar(&l.fsType, "fs-type", "xfs", "the `filesystem` of the volume; empty for a kind whose volumes are directories")
	flag.Parse()
	signal.Ignore(syscall.SIGPIPE) // it would end the demo without removing the mounts
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	begin := time.Now()
	err := l.demo(ctx, *binary)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo:", err)
		os.Exit(1)
	}
	fmt.Printf("The demo took %.1f s. Next: install Trivet in a cluster (docs/getting-started.md), or mount volumes on this machine (docs/volume-manager.md).\n",
		time.Since(begin).Seconds())
}

// demo starts the driver, takes the steps of the volume's life, and removes everything.
func (l *life) demo(ctx context.Context, binary string) (err error) {
	if os.Getuid() != 0 {
		return errors.New("the demo mounts filesystems: run it as root")
	}
	dir, err := os.MkdirTemp("", "trivet-demo-")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, cleanUp(dir)) }()
	if err := makeDisk(dir); err != nil {
		return err
	}
	stop, err := startDriver(ctx, binary, dir)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stop()) }()
	conn, err := grpc.NewClient("unix://"+dir+"/csi.sock", grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return err
	}
	defer conn.Close()
	l.ctx, l.dir = ctx, dir
	l.identity, l.control, l.node = csi.NewIdentityClient(conn), csi.NewControllerClient(conn), csi.NewNodeClient(conn)
	return l.run()
}

// makeDisk mounts a new xfs, which stands for a node's disk.
func makeDisk(dir string) error {
	image, disk := filepath.Join(dir, "disk.img"), filepath.Join(dir, "disk")
	if err := os.Mkdir(disk, 0o755); err != nil {
		return err
	}
	for _, words := range [][]string{{"truncate", "-s", "8G", image}, {"mkfs.xfs", "-q", image}, {"mount", "-o", "loop", image, disk}} {
		if err := command(words[0], words[1:]...).Run(); err != nil {
			return fmt.Errorf("%s: %w", words[0], err)
		}
	}
	return nil
}

// command returns a command without localized output, whose standard error is that of the demo.
func command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(name, args...)
	cmd.Env = append(os.Environ(), "PATH="+os.Getenv("PATH")+":/usr/sbin:/sbin", "LC_ALL=C")
	cmd.Stderr = os.Stderr
	return cmd
}

// startDriver starts the driver with its state on the disk. stop ends the driver, and returns the
// driver's log as an error if the driver failed.
func startDriver(ctx context.Context, binary, dir string) (stop func() error, err error) {
	log, err := os.Create(filepath.Join(dir, "driver.log"))
	if err != nil {
		return nil, err
	}
	cmd := command(binary, "driver", "--endpoint", "unix://"+dir+"/csi.sock", "--node-id", "demo",
		"--config", "", "--state-dir", dir+"/disk/trivet", "--http-address", "")
	cmd.Stdout, cmd.Stderr = log, log
	fmt.Printf("$ %s\n", strings.ReplaceAll(strings.Join(cmd.Args, " "), "  ", " '' ")) // '' is the empty argument
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	stop = func() error {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		err := cmd.Wait()
		if err != nil {
			text, _ := os.ReadFile(log.Name())
			err = fmt.Errorf("the driver ended with %w; its log:\n%s", err, text)
		}
		return errors.Join(err, log.Close())
	}
	if err := awaitSocket(ctx, dir+"/csi.sock"); err != nil {
		return nil, errors.Join(err, stop())
	}
	return stop, nil
}

// awaitSocket returns when the driver listens. A gRPC client that connects earlier would wait before
// it connects again.
func awaitSocket(ctx context.Context, path string) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		if _, err := os.Stat(path); err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return fmt.Errorf("waiting for the driver's socket %s: %w", path, ctx.Err())
		}
	}
}

// cleanUp unmounts the disk and removes the demo's files. It fails if a mount or another file is
// left.
func cleanUp(dir string) error {
	if err := command("umount", filepath.Join(dir, "disk")).Run(); err != nil {
		return fmt.Errorf("unmounting %s/disk, where a mount may be left: %w", dir, err)
	}
	for _, name := range []string{"disk", "disk.img", "driver.log", "staging"} {
		if err := os.Remove(filepath.Join(dir, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := os.Remove(dir); err != nil {
		return fmt.Errorf("files of the demo are left: %w", err)
	}
	fmt.Println("\nNothing is left: no mount, no loop device, no file.")
	return nil
}
