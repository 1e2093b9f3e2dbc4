package main

import (
	"fmt"
	"io"
	"slices"

	"github.com/spf13/cobra"
)

// shells are the shells with completion, each with the function that writes its script.
var shells = map[string]func(root *cobra.Command, w io.Writer) error{
	"bash": func(root *cobra.Command, w io.Writer) error { return root.GenBashCompletionV2(w, true) },
	"zsh":  (*cobra.Command).GenZshCompletion,
	"fish": func(root *cobra.Command, w io.Writer) error { return root.GenFishCompletion(w, true) },
}

var shellNames = []string{"bash", "zsh", "fish"}

func newCompletionCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "completion bash|zsh|fish",
		Short: "Print a completion script for a shell",
		Long: `Prints a script that completes the commands, flags and values of trivet in a shell.
The script for bash needs the package bash-completion.`,
		Example: `  # This shell.
  source <(trivet completion bash)

  # All later shells of all users.
  trivet completion bash > /usr/share/bash-completion/completions/trivet
  trivet completion zsh > /usr/local/share/zsh/site-functions/_trivet
  trivet completion fish > /usr/share/fish/vendor_completions.d/trivet.fish`,
		ValidArgs: shellNames,
		Args: func(_ *cobra.Command, args []string) error {
			if len(args) != 1 || !slices.Contains(shellNames, args[0]) {
				return fmt.Errorf("give the name of one shell: %s", oneOf(shellNames))
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return shells[args[0]](cmd.Root(), cmd.OutOrStdout())
		},
	}
}
