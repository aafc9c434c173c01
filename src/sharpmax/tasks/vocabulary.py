"""Names and filler paragraphs that prompts are built from."""

from __future__ import annotations

import random
import re

_NAMES = """
    Aaron Abel Abigail Abram Ada Adah Adam Adela Adele Adeline Adnan Adrian Agatha Agnes Ahmed Aida Aiden Aiko
    Aileen Aisha Akim Akira Alan Alba Albert Aldo Alec Alena Alessia Alex Alfonso Alfred Ali Alice Alicia Alina
    Alison Alma Alonso Alva Alvin Amadou Amal Amalia Amanda Amara Amber Ambrose Amelia Amina Amir Amit Amos Amy Ana
    Anaya Anders Andre Andrea Andrew Angela Angus Anika Anil Anita Anja Ann Anna Annette Anselm Anthony Antoine
    Anton Antonia Anwar Anya April Archie Ariel Arjun Arlo Armand Arne Arnold Aron Arthur Arturo Arun Arvid Asa
    Asher Ashok Asim Astrid Athena Aubrey Audrey August Aurelio Aurora Austin Ava Avery Axel Aya Ayesha Aziz Bahar
    Barbara Barnaby Bart Basil Bastian Beata Beatrice Becky Bela Belinda Bella Ben Benita Benjamin Bernard Bertha
    Beth Bettina Beverly Bianca Bilal Bill Birgit Bjorn Blaise Blake Blanca Bob Boris Brad Branko Brenda Brett Brian
    Bridget Brigid Britta Bronwyn Bruce Bruno Bryce Burak Byron Caleb Callum Calvin Camila Candace Cara Carina Carl
    Carla Carlos Carmen Carol Caroline Casey Caspar Cassandra Catalina Cecil Cecilia Cedric Celeste Celia Cesar Chad
    Chandra Chantal Charles Charlotte Chen Chester Chiara Chidi Chika Chloe Chris Christa Cillian Clara Clarence
    Claude Claudia Clay Clement Cleo Clifford Clive Clyde Cody Colette Colin Connor Conrad Consuelo Cora Cordelia
    Corey Cornelia Cosima Craig Cristina Cruz Curtis Cynthia Cyril Cyrus Dagmar Daisy Dale Dalia Damian Damon Dana
    Daniel Daphne Dara Daria Darius Darren Dave David Dawn Dean Deborah Declan Deepak Delia Delphine Demetrius
    Denise Dennis Derek Desmond Devon Diana Diego Dieter Dilip Dimitri Dina Dinesh Dion Dirk Dmitri Dolores Dominic
    Donald Donna Dora Doreen Doris Dorothy Douglas Doyle Drew Duncan Dustin Dwight Dylan Earl Ebba Ebony Edda Eden
    Edgar Edith Edmund Eduardo Edward Edwin Efrem Egon Eileen Einar Elaine Eleanor Elena Eli Elias Elijah Elisa Elke
    Ella Ellen Elliot Elmer Elsa Elton Elvira Emeka Emil Emily Emine Emma Emre Enid Enrico Enzo Ephraim Eric Erica
    Erin Ernest Erwin Esme Esteban Esther Ethan Etta Eugene Eunice Eva Evan Evelyn Ewan Ezra Fabian Fadil Faisal
    Faith Fanny Farah Farid Fatima Fay Federico Felicia Felix Ferdinand Fergus Fern Fernanda Fidel Filip Finn Fiona
    Flavia Flora Florence Floyd Frances Francesco Frank Franz Fred Freda Freya Frida Fritz Gabriel Gail Galina
    Gareth Garth Gary Gavin Gemma Gene Genevieve Geoffrey George Georgia Gerald Gerda Gert Gideon Gilbert Gina
    Giovanni Gisela Giulia Gladys Glenn Gloria Goran Gordon Grace Graham Grant Greg Greta Griffin Guido Gunnar
    Gustav Guy Gwen Habib Hadley Haiyan Hakan Haley Hamid Hamish Hana Hank Hanna Hans Harold Haroun Harper Harriet
    Harry Haruto Harvey Hasan Hassan Hattie Hazel Heath Heather Hector Hedda Heidi Heinz Helen Helga Henry Herbert
    Herman Hilary Hilda Hiroshi Holger Holly Homer Hope Horace Hortense Howard Hubert Hugh Hugo Hussein Ian Ibrahim
    Ida Ignacio Igor Ilaria Ilse Iman Imani Imogen Imran Ines Inga Ingrid Ioana Ira Irene Irina Iris Irma Irving
    Isaac Isabel Isadora Isaiah Ismail Ivan Ivo Ivy Jack Jacob Jada Jade Jaime Jakub Jamal James Jamila Jan Jana
    Jane Janet Janice Jared Jarvis Jasmine Jason Jasper Javier Jay Jean Jed Jeff Jemima Jenna Jennifer Jens Jeremy
    Jerome Jesse Jill Jing Joachim Joan Joanna Joaquin Jodie Joel Johan John Jolene Jonas Jonathan Jordan Jorge Jose
    Joseph Joshua Josie Joy Joyce Juan Juanita Jude Judith Julia Julian Juliet Julius June Junko Juno Jurgen Justin
    Justine Kaito Kamal Kamila Kara Karen Karim Karin Karl Kasper Kate Katrin Kay Kazuo Keiko Keira Keith Kelly
    Kelvin Kemal Kendra Kenji Kenneth Kerry Kevin Khadija Khalid Kian Kieran Kim Kira Kirk Kirsten Klara Klaus Knut
    Kofi Koji Kristof Kumar Kurt Kwame Kyle Kylie Laila Lakshmi Lana Lance Lara Larry Lars Laszlo Laura Laurel
    Lauren Lawrence Layla Lea Leah Leander Leif Leila Lena Leo Leon Leona Leopold Leroy Leslie Lester Leticia Levi
    Lewis Li Liam Lidia Lila Lilian Lily Lin Lina Linda Ling Linus Lionel Lisa Liv Livia Lloyd Logan Lois Lola
    Lorena Lorenzo Lottie Lotus Louis Louise Luca Lucas Lucia Lucinda Lucy Ludwig Luis Lukas Luna Luther Lydia Lyle
    Lynn Mabel Mack Madeleine Mads Magda Magnus Mahmoud Maia Makoto Malcolm Malik Mandy Manfred Manuel Mara Marc
    Marcel Marcia Marco Marcus Margaret Maria Mariam Marian Marie Mariko Marina Mario Marisol Marit Marjorie Mark
    Marlene Marlon Marnie Marta Martha Martin Marvin Mary Mason Mateo Mathilda Matthew Maud Maureen Maurice Mavis
    Max Maxine Maya Megan Mehmet Mei Melanie Melissa Melvin Mercedes Meredith Merlin Mia Michael Michelle Miguel
    Mika Mila Mildred Miles Milo Milton Mina Minh Minna Mira Miranda Miriam Mirko Mitchell Mohan Moira Molly Mona
    Monica Montgomery Morgan Morris Moses Muriel Murray Mustafa Myra Myrtle Nadia Nadine Nancy Naomi Nasir Natalie
    Natasha Nathan Neal Ned Neil Nellie Nelson Nestor Neville Nia Nicholas Nico Nicole Nigel Nikita Nils Nina Nisha
    Noah Noel Nora Norbert Noreen Norma Norman Nuno Nuria Octavia Odette Odin Olaf Olga Olive Oliver Olivia Omar
    Opal Ophelia Orla Orlando Orson Oscar Osman Otis Otto Owen Pablo Paloma Pamela Paolo Paris Pascal Patience
    Patricia Patrick Paul Paula Pauline Pavel Pearl Pedro Peggy Penelope Percy Perry Peter Petra Peyton Philip
    Phoebe Phyllis Pia Pierre Pilar Piotr Polly Portia Prakash Preston Priya Quentin Quincy Quinn Rachel Radek
    Rafael Rahul Rainer Raisa Rajesh Ralph Ramon Ramona Randall Rashid Raul Raymond Reba Rebecca Regina Reinhold
    Remy Renata Rene Reuben Rex Rhoda Rhys Ricardo Richard Rita River Robert Robin Rocco Roderick Rodney Roger
    Roland Roman Romeo Ronald Ronan Rosa Rosalind Rose Ross Rowan Roxana Roy Ruben Ruby Rudolf Rufus Rupert Russell
    Ruth Ryan Sabina Sadie Said Sally Salma Salvador Sam Samir Samuel Sandra Sanjay Santiago Sara Sasha Satoshi Saul
    Scarlett Scott Sean Sebastian Selena Selma Serena Sergei Seth Shane Shannon Sharon Shawn Sheila Shelby Sheldon
    Shirin Shirley Sidney Siegfried Sierra Sigrid Silas Silvia Simon Simone Sinead Skye Slavko Sofia Solomon Sonia
    Soren Spencer Stacy Stanley Stefan Stella Stephanie Steven Stuart Sunil Susan Sven Svetlana Sybil Sylvester
    Tabitha Taj Takumi Tamara Tania Tara Tariq Tatiana Taylor Ted Terence Teresa Tess Thaddeus Thandi Thea Thelma
    Theodore Theresa Thomas Thora Tiago Tiffany Tilda Timothy Tina Tobias Todd Tomas Toni Tracy Travis Trevor
    Trinity Tristan Troy Trudy Tyler Tyrone Ulrich Uma Umberto Una Ursula Usha Valentin Valerie Vanessa Vasily Vera
    Verena Vernon Veronica Victor Victoria Vidya Vijay Vikram Vincent Viola Violet Virgil Virginia Vito Vivian
    Vladimir Wade Waleed Walid Wallace Walter Wanda Warren Wayne Wendell Wendy Werner Wesley Wilbur Wilfred Wilhelm
    Willa William Willow Wilma Winifred Winston Wolfgang Xander Xavier Ximena Yael Yara Yasmin Yasuo Yolanda Yosef
    Yuki Yuri Yusuf Yves Yvonne Zachary Zahra Zainab Zara Zelda Zev Zoe Zoltan Zora Zuri
"""

NAMES: tuple[str, ...] = tuple(_NAMES.split())
"""Distinct given names of one word; tasks that use them get a new version whenever this list changes."""


_TEMPLATES = (
    "The {people} {did} the {thing} before the {weather} came over the hills",
    "In the {time}, the {people} sat by the river and talked about the {thing}",
    "Nobody knew why the {thing} had been left beside the {place}",
    "A {mood} wind moved through the {place}, and the {people} went home",
    "Every {time}, somebody carried the {thing} from the {place} to the market",
    "The road to the {place} was {mood}, so the {people} walked slowly",
    "It was said that the {people} once {did} the {thing} for a whole season",
    "When the {weather} ended, the {place} looked {mood} and almost new",
    "Some of the {people} liked the {weather}, but most of them stayed near the {place}",
    "The {thing} in the corner reminded the {people} of a {mood} journey",
    "Behind the {place} there was a path that grew {mood} towards the {time}",
    "The {people} had always {did} the {thing} with great care",
)
_WORDS = {
    "people": """farmers sailors teachers neighbours children bakers gardeners painters shepherds travellers weavers
        musicians carpenters students fishermen cousins potters dancers""",
    "did": """repaired admired painted borrowed carried cleaned described guarded inspected measured polished wrapped
        watched treasured collected""",
    "thing": """lantern ladder wagon blanket kettle basket barrel compass carpet mirror plough anchor violin teapot
        umbrella saddle bench wheel rope curtain""",
    "place": """orchard meadow mill bridge well barn garden forest pond valley chapel stable vineyard quarry courtyard
        fountain hedge shore""",
    "weather": "rain fog snow storm heat frost wind drizzle thunder sunshine hail mist",
    "time": "morning evening spring autumn winter summer afternoon night",
    "mood": "quiet gentle cold strange pleasant narrow dusty calm restless warm pale lonely bright dull slow",
}
_CHOICES = {slot: tuple(words.split()) for slot, words in _WORDS.items()}


def paragraph(rng: random.Random) -> list[str]:
    """The sentences of one paragraph, three or four of different patterns: about fifty tokens."""
    patterns = rng.sample(_TEMPLATES, rng.randint(3, 4))
    return [re.sub(r"{(\w+)}", lambda slot: rng.choice(_CHOICES[slot[1]]), pattern) + "." for pattern in patterns]
