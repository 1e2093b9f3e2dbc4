package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// The groups of commands in the help.
const (
	serviceGroup = "services"
	adminGroup   = "administration"
)

// root is the command tree.
type root struct{ *cobra.Command }

func newRootCommand() root {
	cmd := &cobra.Command{
		Use:   "trivet",
		Short: "CSI driver for storage that the nodes already have",
		Long: `Trivet is a CSI driver for storage that the nodes already have: directories, disk
images, whole disks and NFS exports.

Commands that print data have the flag --output. JSON and YAML contain sizes in bytes,
and times in the format of RFC 3339. Results are written to standard output, errors to
standard error.

The exit status is 0 after success, 2 if the command line is incorrect, and 1 after
any other error.`,
		Example: `  # Serve CSI on a machine without a cluster.
  trivet driver --node-id web-1

  # List the volumes, and check what works on this node.
  trivet volumes
  trivet doctor`,
		RunE:              func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Version:           version,
	}
	cmd.Flags().Bool("version", false, "print the version")
	cmd.SetVersionTemplate("{{.Name}} {{.Version}}\n")
	cmd.AddGroup(&cobra.Group{ID: serviceGroup, Title: "Services:"}, &cobra.Group{ID: adminGroup, Title: "Administration:"})
	cmd.AddCommand(
		newDriverCommand(), newVolumeManagerCommand(), newFlexvolumeCommand(),
		newVolumesCommand(), newDoctorCommand(), newTrimCommand(), newCheckCommand(), newPoolCommand(),
		newVersionCommand("trivet"), newCompletionCommand(),
	)
	cmd.SetHelpCommand(newHelpCommand("  trivet help doctor\n  trivet help volume-manager status"))
	cmd.InitDefaultHelpCmd()
	prepare(cmd)
	return root{cmd}
}

// maxDistance is the maximum Levenshtein distance between an unknown name and a suggested one.
const maxDistance = 2

// prepare makes the errors of the command line of a command and its subcommands usage errors. A command without
// a rule for its arguments accepts none.
func prepare(cmd *cobra.Command) {
	accept := cmd.Args
	if accept == nil {
		accept = noArguments
	}
	cmd.Args = func(cmd *cobra.Command, args []string) error { return asUsageError(cmd, accept(cmd, args)) }
	cmd.SetFlagErrorFunc(flagError)
	cmd.SuggestionsMinimumDistance = maxDistance
	cmd.InitDefaultHelpFlag()
	cmd.Flags().Lookup("help").Usage = "print this help"
	cmd.Flags().SortFlags = false
	for _, sub := range cmd.Commands() {
		prepare(sub)
	}
}

// execute runs the command that the arguments name, and returns its name.
func (r root) execute(args []string) (name string, err error) {
	r.SetArgs(args)
	cmd, err := r.ExecuteC()
	return cmd.CommandPath(), err
}

// usageError is an error in the command line of a command.
type usageError struct {
	command string
	err     error
}

func (e *usageError) Error() string { return e.err.Error() }
func (e *usageError) Unwrap() error { return e.err }

func asUsageError(cmd *cobra.Command, err error) error {
	if err == nil {
		return nil
	}
	return &usageError{cmd.CommandPath(), err}
}

// noArguments refuses all arguments. If the command has subcommands, it suggests those with a similar name.
func noArguments(cmd *cobra.Command, args []string) error {
	switch {
	case len(args) == 0:
		return nil
	case cmd.HasAvailableSubCommands():
		return fmt.Errorf("unknown command %q%s", args[0], suggestion("", cmd.SuggestionsFor(args[0])))
	}
	return fmt.Errorf("unexpected argument %q", args[0])
}

// flagError converts an error of the flags of a command. If a flag is unknown, it suggests a flag with a similar
// name.
func flagError(cmd *cobra.Command, err error) error {
	var unknown *pflag.NotExistError
	if errors.As(err, &unknown) {
		err = fmt.Errorf("%w%s", err, suggestion("--", similarFlags(cmd.Flags(), unknown.GetSpecifiedName())))
	}
	return asUsageError(cmd, err)
}

// similarFlags returns the names of the flags that cobra would suggest if they were commands.
func similarFlags(flags *pflag.FlagSet, name string) []string {
	names := &cobra.Command{SuggestionsMinimumDistance: maxDistance}
	flags.VisitAll(func(f *pflag.Flag) {
		names.AddCommand(&cobra.Command{Use: f.Name, Run: func(*cobra.Command, []string) {}})
	})
	return names.SuggestionsFor(name)
}

// suggestion returns the end of an error about an unknown name. It is empty if no name is similar.
func suggestion(prefix string, names []string) string {
	if len(names) == 0 {
		return ""
	}
	return " (did you mean " + prefix + strings.Join(names, " or "+prefix) + "?)"
}

// newHelpCommand returns the command help with examples.
func newHelpCommand(examples string) *cobra.Command {
	return &cobra.Command{
		Use:               "help [COMMAND]...",
		Short:             "Print the help of a command",
		Long:              "Prints the help of a command, as COMMAND --help does.",
		Example:           examples,
		Args:              cobra.ArbitraryArgs,
		ValidArgsFunction: completeCommands,
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest, err := cmd.Root().Find(args)
			if err == nil {
				err = noArguments(found, rest)
			}
			if err != nil {
				return asUsageError(found, err)
			}
			return found.Help()
		},
	}
}

// completeCommands completes the names of a command and its subcommands.
func completeCommands(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	found, _, err := cmd.Root().Find(args)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var all []cobra.Completion
	for _, sub := range found.Commands() {
		if sub.IsAvailableCommand() {
			all = append(all, cobra.CompletionWithDesc(sub.Name(), sub.Short))
		}
	}
	return all, cobra.ShellCompDirectiveNoFileComp
}
