package main

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/spf13/cobra"

	"github.com/trivet-csi/trivet/pool"
	"github.com/trivet-csi/trivet/volume"
)

func newPoolCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "pool",
		GroupID: adminGroup,
		Short:   "Make an NFS export a pool",
		Long:    "Contains the commands for pools on NFS exports. The driver creates all other pools itself.",
		RunE:    func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newPoolInitCommand())
	return cmd
}

// newPool is the result of trivet pool init.
type newPool struct {
	Name   string `json:"name"`
	UUID   string `json:"uuid"`
	Server string `json:"server"`
	Export string `json:"export"`
}

func newPoolInitCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "init [NAME]",
		Short: "Make an NFS export a pool, and print its UUID",
		Long: `Makes an NFS export a pool and prints the UUID of the pool, which the configuration can
pin (uuid). The export is that of the pool NAME in the configuration, or that of
--server and --export, which need not be in the configuration.

If the export is a pool already, the command does not change it and prints its UUID.
An export that is neither empty nor a pool is refused. "init: true" in the
configuration does the same when the driver first uses the pool.`,
		Example: `  # A pool of the configuration.
  trivet pool init nas

  # Any export.
  trivet pool init --server nas.lan --export /tank/volumes`,
	}
	path, stateDir := configFlag(cmd), stateDirFlag(cmd)
	export := exportFlags(cmd)
	out := outputFlag(cmd)
	cmd.Args = func(_ *cobra.Command, names []string) error { return checkPoolNames(names, *export) }
	cmd.ValidArgsFunction = func(_ *cobra.Command, names []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		if len(names) > 0 {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		return sharedPoolNames(*path, *stateDir), cobra.ShellCompDirectiveNoFileComp
	}
	cmd.RunE = func(cmd *cobra.Command, names []string) error {
		c, err := poolToInit(*path, *stateDir, *export, names)
		if err != nil {
			return err
		}
		bar := startProgress(cmd.ErrOrStderr())
		bar.next("Mounting %s:%s", c.NFS.Server, c.NFS.Export)
		var made []newPool
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		err = inChild(ctx, initTask, c, func(uuid string) {
			made = append(made, newPool{c.Name, uuid, c.NFS.Server, c.NFS.Export})
		})
		bar.end()
		if err != nil {
			return err
		}
		return writeNewPool(out, made)
	}
	return cmd
}

func writeNewPool(out *output, made []newPool) error {
	if len(made) != 1 {
		return fmt.Errorf("the process that makes the pool reported %d pools, want 1", len(made))
	}
	return out.write(made[0], newTable(
		made,
		column[newPool]{name: "POOL", cell: func(p newPool) string { return p.Name }},
		column[newPool]{name: "UUID", cell: func(p newPool) string { return p.UUID }},
		column[newPool]{name: "SERVER", wide: true, cell: func(p newPool) string { return p.Server }},
		column[newPool]{name: "EXPORT", wide: true, cell: func(p newPool) string { return p.Export }},
	))
}

// namedExport is an export that flags name. It need not be in the configuration.
type namedExport struct{ server, export string }

func exportFlags(cmd *cobra.Command) *namedExport {
	var e namedExport
	cmd.Flags().StringVar(&e.server, "server", "", "`name` or address of an NFS server; with --export, selects an export that need not be in the configuration")
	cmd.Flags().StringVar(&e.export, "export", "", "`path` that the server exports")
	return &e
}

func (e namedExport) isSet() bool { return e.server != "" || e.export != "" }

// config returns the configuration of a pool on the export.
func (e namedExport) config() (c pool.Config, err error) {
	server, err := volume.CanonicalServer(e.server)
	if err != nil {
		return c, fmt.Errorf("--server%w", err)
	}
	export, err := volume.CanonicalExport(e.export)
	if err != nil {
		return c, fmt.Errorf("--export%w", err)
	}
	return pool.Config{Name: server + ":" + export, NFS: &pool.NFS{Server: server, Export: export}}, nil
}

// checkPoolNames refuses arguments unless they or the flags name one export.
func checkPoolNames(names []string, e namedExport) error {
	switch {
	case e.isSet() && len(names) > 0:
		return fmt.Errorf("unexpected argument %q: --server and --export already name the export", names[0])
	case !e.isSet() && len(names) != 1:
		return errors.New("give the name of one pool, or --server and --export")
	}
	return nil
}

// poolToInit returns the configuration of the pool that the flags or the argument name.
func poolToInit(path, stateDir string, e namedExport, names []string) (pool.Config, error) {
	if e.isSet() {
		return e.config()
	}
	config, err := loadConfig(path, filepath.Clean(stateDir))
	if err != nil {
		return pool.Config{}, err
	}
	i := slices.IndexFunc(config.Pools, func(c pool.Config) bool { return c.Name == names[0] })
	switch {
	case i < 0:
		return pool.Config{}, fmt.Errorf("pool %q is not in %s: add it, or give --server and --export", names[0], path)
	case !config.Pools[i].Shared():
		return pool.Config{}, fmt.Errorf("pool %q is not an nfs pool, and init is only for nfs pools: the driver creates other pools when it starts", names[0])
	}
	return config.Pools[i], nil
}

// sharedPoolNames returns the names of the nfs pools of a configuration, for completion.
func sharedPoolNames(path, stateDir string) (names []string) {
	config, err := loadConfig(path, filepath.Clean(stateDir))
	if err != nil {
		return nil
	}
	for _, c := range config.Pools {
		if c.Shared() {
			names = append(names, c.Name)
		}
	}
	return names
}
