package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"flag"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	"k8s.io/klog/v2"

	"github.com/trivet-csi/trivet/driver"
	"github.com/trivet-csi/trivet/flexvolume"
	"github.com/trivet-csi/trivet/internal/reexec"
	"github.com/trivet-csi/trivet/pool"
)

const (
	// onDemandCommand runs the driver that a call to flexvolume starts. It is not in the
	// usage.
	onDemandCommand = "flexvolume-driver"
	// onDemandIdle is how long the on-demand driver waits without a call before it ends.
	onDemandIdle = 3 * time.Second
	// onDemandLog is the size in bytes from which the log is started anew.
	onDemandLog = 1 << 20
	// onDemandDir is the path of the state directory, which the driver inherits as descriptor 3:
	// the path of its socket is short however long that of the directory is.
	onDemandDir   = "/proc/self/fd/3"
	onDemandDirFD = 3
)

// onDemandDriver describes the on-demand driver for a configuration. Executables with equal
// configurations share it.
func onDemandDriver(config, stateDir, endpoint string, pools []pool.Config) (d flexvolume.OnDemand, err error) {
	b, err := json.Marshal([]any{endpoint, pools})
	if err != nil {
		return d, err
	}
	sum := sha256.Sum256(b)
	d.Socket = "driver-" + hex.EncodeToString(sum[:8]) + ".sock"
	d.Command = []string{reexec.Self, onDemandCommand, "--config", config, "--state-dir", stateDir, "--endpoint", endpoint, "--socket", d.Socket}
	for _, p := range pools {
		d.Pools = append(d.Pools, p.Name)
	}
	return d, nil
}

// runOnDemandDriver serves CSI for those pools of the configuration that the driver at the
// endpoint does not serve, until it is idle or these are others.
func runOnDemandDriver(args []string) error {
	flags := flag.NewFlagSet("trivet "+onDemandCommand, flag.ContinueOnError)
	path, stateDir, endpoint := configFlag(flags), stateDirFlag(flags), endpointFlag(flags)
	socket := flags.String("socket", "", "`name` of its own socket in the state directory")
	if err := parse(flags, args); err != nil {
		return err
	}
	if *socket == "" {
		return errors.New("it is for this program's own use")
	}
	syscall.CloseOnExec(onDemandDirFD) // programs that it runs do not need the state directory
	lock, err := lockOnDemand(*stateDir, *socket)
	if err != nil || lock == nil {
		return err
	}
	defer lock.Close()
	if err := logOnDemand(*stateDir); err != nil {
		return err
	}
	config, err := loadFlexvolumeConfig(*path, *stateDir)
	if err != nil {
		return err
	}
	running, err := driver.SocketPath(*endpoint)
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	var names []string
	for _, p := range config.Pools {
		names = append(names, p.Name)
	}
	served, err := flexvolume.PoolsServed(ctx, running, names)
	if err != nil { // calls without a pool can be served all the same
		klog.FromContext(ctx).Error(err, "The running driver does not say which pools it serves")
	}
	config.Pools = slices.DeleteFunc(config.Pools, func(p pool.Config) bool { return slices.Contains(served, p.Name) })
	o := driver.Options{
		Version: version, Kinds: kinds, Name: driver.DefaultName, NodeID: "flexvolume", StateDir: *stateDir,
		Endpoint: "unix://" + filepath.Join(onDemandDir, *socket), Services: []string{"controller", "node"},
		Config:   driver.Config{Pools: config.Pools, MaxVolumesPerNode: config.MaxVolumesPerNode},
		Worker:   reexec.Self,
		IdleTime: onDemandIdle,
	}
	defer klog.Flush()
	go func() {
		defer stop()
		flexvolume.AwaitChange(ctx, running, names, served)
	}()
	return driver.Run(ctx, o)
}

// lockOnDemand takes the lock of an on-demand driver for the life of the process; nil: another
// one has it.
func lockOnDemand(stateDir, socket string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(stateDir, socket+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		return f, nil
	}
	f.Close()
	if errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, nil //nolint:nilnil // another process has the lock
	}
	return nil, err
}

// logOnDemand sends the log to a file: the process outlives the call that started it. It also
// leaves that call's directory, which may be on a filesystem that is to be unmounted.
func logOnDemand(stateDir string) error {
	path := filepath.Join(stateDir, flexvolume.LogFile)
	mode := os.O_WRONLY | os.O_CREATE | os.O_APPEND
	if info, err := os.Stat(path); err == nil && info.Size() > onDemandLog {
		mode |= os.O_TRUNC
	}
	f, err := os.OpenFile(path, mode, 0o600)
	if err != nil {
		return err
	}
	os.Stderr = f
	return os.Chdir("/")
}
